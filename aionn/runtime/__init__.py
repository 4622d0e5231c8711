"""The app's process: everything a public call does before it crosses the wall.

    runtime         owns every task, every driver process and all memory
    devices         starts, watches and ends driver processes; spawning: makes the process; liveness: whether one hangs;
                    restarts: when one that died is started again
    model           ONNX into shared memory
    plan            which device runs a model; preparation: from the cache if it can be, compiled if it must be
    compilation     what an app holds; compiled_model: the stages behind it and the one that serves
    burst           a stream of executions; link: its connection to one driver; frame: memory for one request; stream: `map`
    arguments       what an app passes, checked and laid out in a frame; frames: the frames; placement: what lies elsewhere
    device_memory   a tensor that stays in the driver; recurrent: the short way of a stream that keeps its state there
    stages          better stages, one after the other; stage: one of them, and the policy; frequency: whether use warrants them;
                    background: who compiles them; comparing: whether they are better; measuring: how long a run takes;
                    verdicts: what was measured, kept with the cache; moving: device memory to another driver;
                    way_back: from a stage that fails to the one before; swapping: a new model in place of the old one

Nobody here knows the driver's rooms.
"""
