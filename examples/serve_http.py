"""Serve a model over HTTP, and send it the frames of a recording from a client that does not use aionn.

    pip install -e '.[onnxruntime,web,examples]'
    pip install --no-deps --ignore-requires-python -r examples/models.txt
    python examples/serve_http.py [--seconds S] [--json]

It starts `aionn serve-http` with Silero VAD, a model that hears speech. Then it sends the frames of a recording by the Open Inference
Protocol: plain HTTP, with tensors as raw bytes. The client uses only NumPy and Python's standard library. The state of the model travels
with each request, because the server keeps no state.

Exit codes: 0 fine, 1 the server failed, 2 wrong usage (a package is not installed), 130 interrupted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from answers import print_answer
from carriers import UsageError, packaged
from voice_activity import SAMPLE_RATE, load_recording, windows

HEADER = "Inference-Header-Content-Length"
Arrays = dict[str, NDArray[np.float32]]


class ServerError(Exception):
    """The server did not start, or answered with an error."""


@contextmanager
def server(model: Path) -> Iterator[str]:
    """Run `aionn serve-http` for the body, which begins when the model is compiled. Yields HOST:PORT."""
    command = [sys.executable, "-m", "aionn", "serve-http", f"vad={model}", "--listen", "127.0.0.1:0", "--device", "onnxruntime"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield address_in(process.stderr)
        finally:
            process.send_signal(signal.SIGTERM)


def address_in(lines: Iterator[str]) -> str:
    """Return HOST:PORT from the line that says that the models are ready. Wait for that line.

    Raises:
        ServerError: the server ended before.
    """
    printed = ""
    for line in lines:
        printed = line.strip()
        if ": ready: http://" in line:
            return line.split("http://")[1].split("/")[0]
    raise ServerError(f"the server did not start: {printed}")


def infer(connection: http.client.HTTPConnection, model: str, inputs: Arrays) -> Arrays:
    """Run a model once by the protocol. Tensors follow the JSON as raw bytes, in both directions.

    Raises:
        ServerError: the server answered with an error.
    """
    described = [
        {"name": name, "shape": list(array.shape), "datatype": "FP32", "parameters": {"binary_data_size": array.nbytes}}
        for name, array in inputs.items()
    ]
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(array.tobytes() for array in inputs.values())
    connection.request("POST", f"/v2/models/{model}/infer", body, {HEADER: str(len(head))})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise ServerError(f"the server answered {answer.status}: {json.loads(content)['error']}")
    at = int(answer.headers[HEADER])
    outputs: Arrays = {}
    for one in json.loads(content[:at])["outputs"]:
        size = one["parameters"]["binary_data_size"]
        outputs[one["name"]] = np.frombuffer(content[at : at + size], np.float32).reshape(one["shape"])
        at += size
    return outputs


def listen(address: str, samples: NDArray[np.float32]) -> dict[str, object]:
    """Send a recording (16 kHz, mono) frame by frame. Return the probability of speech of each frame, and counts and times."""
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", "/v2/models/vad")
    names = [one["name"] for one in json.loads(connection.getresponse().read())["inputs"]]
    state = np.zeros((2, 1, 128), np.float32)
    probabilities, took_ns = [], []
    for window in windows(samples):
        began_ns = time.perf_counter_ns()
        outputs = infer(connection, "vad", {"input": window[np.newaxis], "state": state})
        took_ns.append(time.perf_counter_ns() - began_ns)
        state = outputs["stateN"]
        probabilities.append(float(outputs["output"][0, 0]))
    connection.request("GET", "/v2/models/vad/stats")
    stats = json.loads(connection.getresponse().read())["model_stats"][0]
    connection.close()
    return {
        "inputs": names,
        "frames": len(probabilities),
        "speech_frames": sum(one >= 0.5 for one in probabilities),
        "probabilities": probabilities,
        "p50_us": round(float(np.percentile(took_ns, 50)) / 1000, 1),
        "served": stats["inference_count"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="serve_http.py", description="Serve a model over HTTP, and ask it.")
    parser.add_argument("--seconds", type=float, default=10.0, help="how much of the recording to send (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        if not options.seconds > 0:
            raise UsageError(f"--seconds {options.seconds:g}: give a positive number of seconds")
        samples = load_recording(packaged("moonshine_voice", "assets/two_cities.wav"))[: int(options.seconds * SAMPLE_RATE)]
        with server(packaged("silero_vad", "data/silero_vad_openvino_16k.onnx")) as address:
            found = listen(address, samples)
    except UsageError as error:
        print(f"serve_http.py: {error}", file=sys.stderr)
        return 2
    except (ServerError, OSError) as error:
        print(f"serve_http.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    text = f"{found['frames']} frames over HTTP, {found['speech_frames']} of them speech; p50 {found['p50_us']} us per frame"
    return print_answer("serve_http.py", json.dumps(found) if options.json else text)


if __name__ == "__main__":
    sys.exit(main())
