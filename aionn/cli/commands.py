"""The command line: the arguments of each command. A command's work is in its own module, imported when the command is called."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

from aionn.adapters.frigate import ENDPOINT
from aionn.cli.printing import UsageError, bytes_of, run_reported, seconds_of

Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False, help="Print one JSON value instead of a table.")]
StateDir = Annotated[str | None, Parameter(name="--state-dir")]
Threads = Annotated[int | None, Parameter(name="--threads", help="Engine threads for one run. Default: the engine chooses.")]
Instances = Annotated[
    int | None,
    Parameter(
        name="--instances", help="How many runs may go on beside each other, over one copy of the weights. Default: the engine chooses."
    ),
]
Shapes = Annotated[list[str] | None, Parameter(name="--shape", negative="")]
DeviceNames = Annotated[list[str] | None, Parameter(name="--device", negative="")]

app = App(
    name="aionn",
    help="Compile and run neural networks in driver processes, with a cache that can be trusted.",
    suppress_keyboard_interrupt=False,  # `run_command` reports it, like every other end
)
cache = App(name="cache", help="Look after a directory of cached compilations.")
fleet = App(name="fleet", help="Sign compiled models, and carry them between machines.")
ray = App(name="ray", help="Use aionn on a Ray cluster.")
app.command(cache)
app.command(fleet)
app.command(ray)


def _version() -> str:
    from importlib.metadata import version

    return version("aionn")


app.version = _version


@app.command(name="compile")
def compile_(
    model: str,
    /,
    *,
    cache_dir: Annotated[str, Parameter(name="--cache-dir")],
    device: DeviceNames = None,
    stages: Annotated[str | None, Parameter(name="--stages")] = None,
    threads: Threads = None,
    instances: Instances = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Compile a model into a cache, so that later starts only load it.

    Args:
        model: Path of an ONNX file.
        cache_dir: Directory of the cache; made if it is missing.
        device: Name of a device to compile for; give it again for more. Default: the best one that can run the model.
        stages: Names of devices from quick to best, with commas. Each is stored and compared with the one before, on inputs that are
            made up. An app that asks for these stages with this cache compiles none of them; it compares them once more, on its own
            inputs, before a better one serves.
        state_dir: Folder of the records that vouch for the cache; it must last as long. Default: $XDG_STATE_HOME/aionn, else
            ~/.local/state/aionn.
    """
    from aionn.cli.compiling import CompileArguments, compile_model

    if stages is not None:
        if device:
            raise UsageError("--stages names the devices itself; leave out --device")
        device = [name.strip() for name in stages.split(",")]
        if not all(device) or len(set(device)) < len(device):
            raise UsageError(f"--stages {stages!r}: give names of devices with commas between, each once, as in onnxruntime,openvino")
    options = CompileArguments(cache_dir, device, stages is not None, state_dir, {"threads": threads, "instances": instances})
    compile_model(model, options, as_json=json)


@app.command
def run(
    model: str,
    /,
    *,
    input: Annotated[list[str] | None, Parameter(name="--input", negative="")] = None,  # noqa: A002 -- the option's name
    device: str | None = None,
    repeat: int = 1,
    burst: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    threads: Threads = None,
    instances: Instances = None,
    cache_dir: Annotated[str | None, Parameter(name="--cache-dir")] = None,
    state_dir: StateDir = None,
    json: Json = False,
    trace: str | None = None,
    shape: Shapes = None,
) -> None:
    """Run a model and show its outputs and its speed.

    Args:
        model: Path of an ONNX file.
        input: NAME=FILE.npy, once for each input. An input that is not given gets random numbers (seed 0), its open dimensions 1.
        device: Name of the device. Default: the best one that can run the model.
        repeat: How often to run it.
        burst: Send the requests through one burst, whose outputs are not copied.
        cache_dir: Take the compilation from this cache, or store it there.
        state_dir: Folder of the records that vouch for the cache; it must last as long. Default: $XDG_STATE_HOME/aionn, else
            ~/.local/state/aionn.
        trace: Write what happened to this file, in the format that Perfetto opens.
        shape: NAME=1x3x224x224, the shape of an input that is made up; give it again for more. For open dimensions.
    """
    from aionn.cli.running import RunOptions, run_model

    run_model(model, RunOptions(input or (), device, repeat, burst, cache_dir, state_dir, trace, threads, instances, shape or ()), json)


Socket = Annotated[str | None, Parameter(name="--socket")]


@app.command
def serve(
    *,
    socket: Socket = None,
    replace: Annotated[bool, Parameter(name="--replace", negative="", show_default=False)] = False,
    state_dir: StateDir = None,
    systemd: Annotated[str | None, Parameter(name="--systemd")] = None,
) -> None:
    """Serve the apps of this user with drivers that they share, until Ctrl-C or SIGTERM.

    An app uses it with Runtime(service="auto") or with the variable AIONN_SERVICE=auto.

    Args:
        socket: Path of the socket. Default: $XDG_RUNTIME_DIR/aionn/service.sock, or the socket that systemd gives.
        replace: Take the place of the service that listens there. That one ends when its last app has gone.
        state_dir: Folder of the records that vouch for caches; it must last as long. Default: $XDG_STATE_HOME/aionn, else
            ~/.local/state/aionn.
        systemd: Serve nothing, and write units for systemd into this folder, as ~/.config/systemd/user.
    """
    from aionn.cli.service import ServeServiceOptions
    from aionn.cli.service import serve as serve_apps

    serve_apps(ServeServiceOptions(socket, replace, state_dir, systemd))


@app.command
def ps(*, socket: Socket = None, json: Json = False) -> None:
    """List the apps that share the drivers of the service, and what they hold.

    Args:
        socket: Path of the service's socket. Default: $XDG_RUNTIME_DIR/aionn/service.sock.
    """
    from aionn.cli.service import show

    show(socket, json)


@app.command
def evict(key: str = "", /, *, socket: Socket = None, json: Json = False) -> None:
    """Free models that no app of the service holds. They go by themselves after 300 seconds.

    Args:
        key: The model's key, as `aionn ps` prints it. Default: all that no app holds.
        socket: Path of the service's socket. Default: $XDG_RUNTIME_DIR/aionn/service.sock.
    """
    from aionn.cli.service import evict as free

    free(socket, key, json)


@app.command(name="serve-http")
def serve_http(
    *model: str,
    listen: str = "127.0.0.1:8000",
    device: DeviceNames = None,
    threads: Threads = None,
    cache_dir: Annotated[str | None, Parameter(name="--cache-dir")] = None,
    state_dir: StateDir = None,
    max_body: Annotated[str, Parameter(name="--max-body")] = "64M",
) -> None:
    """Serve models over HTTP by the Open Inference Protocol (KServe v2), until Ctrl-C or SIGTERM.

    The server answers at once. Requests for a model get status 503 until it is compiled. Under /livez, /readyz and /startupz are the health
    routes of aionn. Anyone who can connect can use the models.

    Args:
        model: Path of an ONNX file, or NAME=PATH. Without a name it is served under the file's name, without its ending.
        listen: HOST:PORT to listen on. Host 0.0.0.0 is every network of this machine. Port 0 takes a free one.
        device: Name of a device that may run the models; give it again for more. Default: the best one that can run each model.
        cache_dir: Take compilations from this cache, and store them there.
        state_dir: Folder of the records that vouch for the cache; it must last as long. Default: $XDG_STATE_HOME/aionn, else
            ~/.local/state/aionn.
        max_body: The largest request, as 500000000, 500M or 2G (powers of 1000).
    """
    from aionn.cli.serving.http import ServeOptions, serve

    options = ServeOptions(listen, device, threads, cache_dir, state_dir, bytes_of(max_body, "--max-body"))
    serve(model, options)


@app.command(name="serve-frigate")
def serve_frigate(
    *,
    endpoint: str = ENDPOINT,
    model: Annotated[str | None, Parameter(name="--model")] = None,
    device: DeviceNames = None,
    threads: Threads = None,
    service: Annotated[str | None, Parameter(name="--service")] = None,
    timeout_ms: Annotated[int, Parameter(name="--timeout-ms")] = 200,
    max_model: Annotated[str, Parameter(name="--max-model")] = "256M",
    cache_dir: Annotated[str | None, Parameter(name="--cache-dir")] = None,
    state_dir: StateDir = None,
) -> None:
    """Serve detectors of Frigate, of its type zmq, until Ctrl-C or SIGTERM.

    Frigate is not changed. Its configuration names the same endpoint. A client must run as the same user, or as root.

    Args:
        endpoint: The socket, as ipc:///run/aionn/frigate. Its folder must belong to this user. Default: that of Frigate's detector.
        model: Path of an ONNX file, which serves every detector. Default: each detector sends its own.
        device: Name of a device that may run the models; give it again for more. Default: the best one that can run each model.
        service: Use the drivers of `aionn serve`: the path of its socket, or auto for a service that may not be there.
        timeout_ms: What is not computed in so many milliseconds is not answered. Give the request_timeout_ms of Frigate's detector.
        max_model: The largest model that a detector may send, as 500000000, 500M or 2G (powers of 1000).
        cache_dir: Take compilations from this cache, and store them there. Default: $XDG_CACHE_HOME/aionn/frigate, else
            ~/.cache/aionn/frigate.
        state_dir: Folder of the records that vouch for the cache; it must last as long. Default: $XDG_STATE_HOME/aionn, else
            ~/.local/state/aionn.
    """
    from aionn.cli.serving.frigate import ServeFrigateOptions, serve

    largest = bytes_of(max_model, "--max-model")
    serve(ServeFrigateOptions(endpoint, model, device, threads, service, timeout_ms, largest, cache_dir, state_dir))


@app.command(name="serve-wyoming")
def serve_wyoming(
    *,
    uri: str = "tcp://127.0.0.1:10400",
    model: Annotated[list[str] | None, Parameter(name="--model", negative="")] = None,
    features: str | None = None,
    threshold: float = 0.5,
    service: str | None = None,
) -> None:
    """Serve wake words and voice activity to Home Assistant and its satellites (Wyoming), until Ctrl-C or SIGTERM.

    Anyone who can connect can use the models.

    Args:
        uri: Address to listen on: tcp://HOST:PORT or unix:///PATH. tcp://0.0.0.0:10400 is every network of this machine.
        model: Path of a wake word of openWakeWord (.tflite or .onnx), of a folder of them, or of Silero VAD (.onnx); give it again for
            more. A word has the name of its file. Default: the five words of the package pyopen-wakeword, if it is installed.
        features: Folder of melspectrogram and embedding_model, which make the features of all words. Default: that of the first word.
        threshold: A score above it is a detection.
        service: Use the drivers of `aionn serve`: auto, off or the path of its socket. Default: $AIONN_SERVICE, else off.
    """
    from aionn.cli.serving.wyoming import ServeWyomingOptions, serve

    serve(ServeWyomingOptions(uri, model or (), features, threshold, service))


@app.command(name="trace")
def trace_(
    *,
    pid: int,
    output: Annotated[str, Parameter(name=("--output", "-o"))],
    seconds: float = 5.0,
    json: Json = False,
) -> None:
    """Trace a running app and its drivers from outside, and write a file that Perfetto opens.

    The app needs no change and goes on as before. It must run as the same user.

    Args:
        pid: Number of the app's process. `aionn top` lists them.
        output: The file. It is compressed if its name ends in .gz.
        seconds: How long to trace.
    """
    from aionn.cli.tracing import trace_process

    trace_process(pid, seconds, output, json)


@app.command
def devices(*, json: Json = False) -> None:
    """List the devices whose engine is installed, and start each one to see whether it works and what confines its driver."""
    from aionn.cli.listing import list_devices

    list_devices(json)


@app.command
def doctor(
    *,
    fix: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    cache_dir: Annotated[str | None, Parameter(name="--cache-dir")] = None,
    device: DeviceNames = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Check everything that aionn needs on this machine, and name the way out of what is wrong. Exits 1 if a check fails.

    Args:
        fix: Remove what aionn itself has left: drivers without an app, unneeded records, and unfinished files in its folders.
        cache_dir: A cache to check, too.
        device: Name of a device to try; give it again for more. Default: every installed engine.
        state_dir: Folder of the records that vouch for the cache. Default: $XDG_STATE_HOME/aionn, else ~/.local/state/aionn.
    """
    from aionn.cli.doctor import examine

    examine(state_dir, cache_dir, device, fix=fix, as_json=json)


@app.command
def bench(
    subject: str = "",
    /,
    *,
    device: str | None = None,
    shape: Shapes = None,
    seconds: float = 12.0,
    compare: str | None = None,
    json: Json = False,
) -> None:
    """Measure how fast aionn is on this machine, beside what does the same work without it.

    Args:
        subject: burst, cache or stages; or the path of a model. Default: bursts, the cache, and the start of a process.
        device: Name of the device. Default: for bursts "reference", whose answer is quickest; else the best one.
        shape: NAME=1x3x224x224, the shape of an input of the model; give it again for more.
        seconds: About how long to measure. Each kind is measured in at least 5 rounds, whatever time they take.
        compare: A file that an earlier `aionn bench --json` wrote. Exits 1 if something takes over 10 % longer, beyond chance.
    """
    from aionn.cli.bench import BenchOptions, run_bench

    run_bench(BenchOptions(subject, device, shape or (), seconds, compare), json)


@app.command
def top(
    *,
    once: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    pid: int | None = None,
    interval: float | None = None,
    json: Json = False,
) -> None:
    """Show what runs: runtimes, driver processes and bursts of all your processes. Keys: q quits, s sorts, p pauses.

    Args:
        once: Print one snapshot. That is also what happens where stdout is not a terminal, and with --json.
        pid: Show only the app with this process number.
        interval: Seconds between two looks; default 1. One snapshot has averages since each burst was opened, and with
            --interval those of that time.
    """
    from aionn.cli.top import show_top

    show_top(pid, interval, once=once, as_json=json)


@app.command
def metrics(
    *,
    listen: str = "127.0.0.1:9787",
    once: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: Json = False,
) -> None:
    """Serve metrics of all runtimes of this user for Prometheus, until Ctrl-C or SIGTERM.

    Runtimes with the same name are counted together. What a process had counted when it ended stays counted, so no counter falls when
    a worker restarts. A process that lives for less than a second may be missed.

    Args:
        listen: HOST:PORT to serve on, under the path /metrics. Port 0 takes a free one. Anyone who can connect can read the metrics.
        once: Print the metrics of now, and serve nothing.
        json: Print the metrics of now as one JSON value, and serve nothing.
    """
    from aionn.cli.metrics import print_metrics, serve_metrics

    if once or json:
        print_metrics(json)
    else:
        serve_metrics(listen)


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that lets a shell complete the commands and options of aionn at the Tab key.

    For bash, write it to ~/.local/share/bash-completion/completions/aionn. For fish, write it to ~/.config/fish/completions/aionn.fish. For
    zsh, write it to a file _aionn in a folder of $fpath.

    Args:
        shell: bash, zsh or fish.
    """
    print(app.generate_completion(prog_name="aionn", shell=shell))


@cache.command
def ls(directory: str, /, *, json: Json = False) -> None:
    """List what a cache holds, oldest first, and what was measured of stages.

    Args:
        directory: Directory of the cache.
    """
    from aionn.cli.caches import list_entries

    list_entries(existing(directory), json)


@cache.command
def verify(directory: str, /, *, json: Json = False) -> None:
    """Read every file of a cache and name each entry that is not as it was stored. Exits 1 if there is one.

    This check finds damage. A forgery may pass it, so a driver decides by records in its state directory what it may load.

    Args:
        directory: Directory of the cache.
    """
    from aionn.cli.caches import verify_entries

    verify_entries(existing(directory), json)


@cache.command
def prune(
    directory: str,
    /,
    *,
    max_bytes: Annotated[str | None, Parameter(name="--max-bytes")] = None,
    stage_measurements: Annotated[bool, Parameter(name="--stage-measurements", negative="", show_default=False)] = False,
    json: Json = False,
) -> None:
    """Remove entries of older driver versions, unreadable ones, and the least valuable ones beyond a budget.

    Args:
        directory: Directory of the cache.
        max_bytes: The budget, as 500000000, 500M or 2G (powers of 1000). Default: 4 GiB, as for an app.
        stage_measurements: Remove every stage measurement, too, so that apps compare their stages anew. Those older than a week always go.
    """
    from aionn.cli.caches import prune_entries

    prune_entries(existing(directory), None if max_bytes is None else bytes_of(max_bytes, "--max-bytes"), stage_measurements, json)


@fleet.command
def keygen(
    key: str,
    /,
    *,
    name: str,
    device: DeviceNames = None,
    days: int | None = None,
    json: Json = False,
) -> None:
    """Make a builder's key: KEY, which signs and stays secret, and KEY.pub, which machines that pull put into their keyring.

    Args:
        key: Path of the private key, made with mode 0600. It must not exist.
        name: Name of the builder, for people.
        device: Name of a device that the key may sign for; give it again for more. Default: every device.
        days: Days after which machines adopt nothing more that the key has signed. Default: no limit.
    """
    from aionn.cli.fleet import make_key

    if days is not None and days < 1:
        raise UsageError(f"--days {days}: give at least 1, or leave it out for a key without an end")
    make_key(key, name, device or (), days, json)


@fleet.command
def push(
    cache_dir: str,
    url: str,
    /,
    *,
    key: str,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Sign what this machine has compiled into a cache, and push it to a store. Exits 1 if an entry cannot be signed.

    An entry is signed only if the records in the state directory show that a driver of this machine has compiled it.

    Args:
        cache_dir: Directory of the cache.
        url: The store: a directory, file:///path or s3://bucket/prefix. A directory is made if it is missing.
        key: Path of the builder's private key.
        state_dir: Folder of the records that vouch for the cache. Default: $XDG_STATE_HOME/aionn, else ~/.local/state/aionn.
    """
    from aionn.cli.fleet import push_entries

    push_entries(cache_dir, url, key, state_dir, json)


@fleet.command
def pull(
    url: str,
    cache_dir: str,
    /,
    *,
    device: DeviceNames = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Fetch what trusted builders have compiled for this machine, and adopt it, so that the first start is a hit.

    Exits 1 if the store does not answer for 2 seconds, or if an artifact is refused. An app then compiles what is missing.

    Args:
        url: The store: a directory, file:///path or s3://bucket/prefix.
        cache_dir: Directory of the cache; made if it is missing.
        device: Name of a device; give it again for more. Default: every installed one that starts.
        state_dir: Folder of the records that vouch for the cache; it must last as long. Default: $XDG_STATE_HOME/aionn, else
            ~/.local/state/aionn.
    """
    from aionn.cli.fleet import pull_entries

    pull_entries(url, cache_dir, device, state_dir, json)


@fleet.command(name="verify")
def verify_(
    url: str,
    /,
    *,
    remove: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: Json = False,
) -> None:
    """Read every statement, file and model of a store, and name those that no machine could use. Exits 1 if there is one.

    Signatures are checked with the keyring of this user, so a statement of another builder is named, too. With an empty keyring only
    the files, the models and the form of the statements are checked. A model is copied to $TMPDIR while it is checked.

    Args:
        url: The store: a directory, file:///path or s3://bucket/prefix.
        remove: Remove what was named, so that the next push or compile writes it again.
    """
    from aionn.cli.fleet import verify_store

    verify_store(url, remove, json)


@fleet.command
def gc(
    url: str,
    /,
    *,
    keep: str = "30d",
    max: str | None = None,  # noqa: A002 -- the option's name
    dry_run: Annotated[bool, Parameter(name="--dry-run", negative="", show_default=False)] = False,
    json: Json = False,
) -> None:
    """Remove old artifacts from a store: statements first, then files that no statement names.

    Nothing younger than 24 hours is removed, so it is safe while others push and pull.

    Args:
        url: The store: a directory, file:///path or s3://bucket/prefix.
        keep: How long an artifact is kept after it was pushed, and after a machine of its kind has pulled: 90s, 15m, 12h, 30d.
        max: The budget of all files, as 500M or 50G (powers of 1000). The oldest artifacts go first. Default: no budget.
        dry_run: Remove nothing, and print what would be removed.
    """
    from aionn.cli.fleet import sweep_store

    sweep_store(url, seconds_of(keep, "--keep"), None if max is None else bytes_of(max, "--max"), dry_run, json)


@ray.command(name="node-resources")
def node_resources(*, device: DeviceNames = None, json: Json = False) -> None:
    """Show the resources by which compile tasks find this machine. Each device is started once.

    With --json it prints what Ray takes: ray start --resources="$(aionn ray node-resources --json)".

    Args:
        device: Name of a device; give it again for more. Default: every installed one that starts and caches.
    """
    from aionn.cli.ray import show_node_resources

    show_node_resources(device, json)


def existing(directory: str) -> Path:
    """Return a directory that is a cache, or is empty like a new one. The commands change nothing in any other directory."""
    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"there is no cache directory {directory!r}; give the cache_dir of an app or of aionn compile")
    if not all((path / part).is_dir() for part in ("entries", "locks")) and any(path.iterdir()):
        raise UsageError(f"{directory!r} is not a cache, because it holds other files; give the cache_dir of an app or of aionn compile")
    return path


def run_command(arguments: Sequence[str] | None) -> int:
    """Run one command and return its exit code. Print an error as one sentence."""
    return run_reported(partial(_run, arguments))


def _run(arguments: Sequence[str] | None) -> None:
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_none")
    except UnusedCliTokensError as error:
        command = " ".join(("aionn", *(error.command_chain or ())))
        words = " ".join(error.unused_tokens or ())
        raise UsageError(f"{command} has no place for {words!r}; leave it out. See {command} --help.") from error
    except CycloptsError as error:
        raise UsageError(f"{' '.join(str(error).split())} See aionn --help.") from error
