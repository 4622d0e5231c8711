"""An agent server of LiveKit, for tests: it forks jobs, whose models answer over the service at a path.

    python -m tests.adapters.livekit_app SOCKET_OF_SERVICE

Each job answers `double` by aionn, and `reverse` by the executor that the job had before, as a registered runner of LiveKit does. For each
line on stdin the server asks all jobs, and prints what they say as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
from typing import Any

import numpy as np
from livekit.agents import JobContext, get_job_context
from livekit.agents.ipc.job_proc_executor import ProcJobExecutor
from livekit.agents.job import JobAcceptArguments, JobProcess, RunningJobInfo
from livekit.protocol import agent, models

import aionn
from aionn.adapters.livekit import AionnInferenceExecutor, OnnxMethod
from aionn.testing import identity_model

SERVICE, REPORT = "AIONN_TEST_SERVICE", "AIONN_TEST_REPORT"


class Reversing:
    """Stands for LiveKit's inference process. It is an `InferenceExecutor` of the server, which the jobs ask over their pipes."""

    async def do_inference(self, method: str, data: bytes) -> bytes | None:
        assert method == "reverse", method
        return data[::-1]


def prewarm(process: JobProcess) -> None:
    """LiveKit wants it."""


async def job(ctx: JobContext) -> None:
    """The entrypoint of a job: in a process that LiveKit has forked."""
    runtime = aionn.Runtime(service=os.environ[SERVICE], start=())
    await runtime.open()
    ctx.add_shutdown_callback(runtime.aclose)
    compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (1, 4)})), devices=("reference",))
    method = OnnxMethod(
        compilation, lambda data: {"x": np.frombuffer(data, np.float32).reshape(1, 4)}, lambda outputs: (2 * outputs["x_out"]).tobytes()
    )
    AionnInferenceExecutor({"double": method}, retry=1).install(ctx)
    reader, writer = await asyncio.open_unix_connection(os.environ[REPORT])
    while await reader.readline():
        executor = get_job_context().inference_executor
        doubled = await executor.do_inference("double", np.arange(4, dtype=np.float32).tobytes())
        assert doubled is not None
        said = {
            "pid": os.getpid(),
            "driver": next(device.pid for device in runtime.devices if device.name == "reference"),
            "doubled": np.frombuffer(doubled, np.float32).tolist(),
            "reversed": (await executor.do_inference("reverse", b"abc") or b"").decode(),
        }
        writer.write(json.dumps(said).encode() + b"\n")
    writer.close()


def a_job(number: int) -> RunningJobInfo:
    room = models.Room(name=f"room {number}", sid=f"RM_{number}")
    info = agent.Job(id=f"job-{number}", room=room, type=agent.JobType.JT_ROOM)
    accepted = JobAcceptArguments(identity="agent", name="", metadata="")
    return RunningJobInfo(accept_arguments=accepted, job=info, url="", token="", worker_id="server", fake_job=True)


async def server(service: str) -> None:
    os.environ[SERVICE] = service
    os.environ[REPORT] = f"{service}-report"
    arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["livekit.agents.ipc._preload", __name__])
    how: dict[str, Any] = {"initialize_process_fnc": prewarm, "job_entrypoint_fnc": job, "inference_executor": Reversing()}
    how |= dict.fromkeys(("session_end_fnc", "simulation_end_fnc", "http_proxy"))
    how |= dict.fromkeys(("initialize_timeout", "close_timeout", "session_end_timeout", "ping_interval", "ping_timeout"), 60.0)
    how |= {"memory_warn_mb": 0, "memory_limit_mb": 0, "high_ping_threshold": 60.0, "mp_ctx": context}
    async with await asyncio.start_unix_server(lambda *ends: arrived.put_nowait(ends), os.environ[REPORT]):
        jobs = [ProcJobExecutor(**how, loop=asyncio.get_running_loop()) for _ in range(2)]
        for number, each in enumerate(jobs):
            await each.start()
            await each.initialize()
            await each.launch_job(a_job(number))
        ends = [await arrived.get() for _ in jobs]
        for line in iter(sys.stdin.readline, ""):
            assert line == "ask\n"
            for _, writer in ends:
                writer.write(b"ask\n")
            print(json.dumps([json.loads(await reader.readline()) for reader, _ in ends]), flush=True)
        for _, writer in ends:
            writer.close()
        for each in jobs:
            await each.aclose()


if __name__ == "__main__":
    # Under its own name, so that a job finds `job`: the forkserver does not have this `__main__`.
    from tests.adapters import livekit_app

    asyncio.run(livekit_app.server(sys.argv[1]))
