"""A model gets ready on a device: from the cache if it can, compiled if it must.

plan         which device prepares the model, or which devices
partition    cut a model over several devices, and prepare each step
kept_plan    a plan as a cache keeps it
step_model   one step of a plan as a model
renewal      keep the model of a compilation prepared: at the first use, and anew when its driver has died
idling       give the driver's memory back while the app does not use a compilation
tuning       store the better artifact that an engine offers while it runs
background   make a better stage behind the stream: ask a backend, or have the worker compile it
worker       the local worker: a process at the lowest priority that compiles, as a backend
preparation  one model on one device: HIT, MISS, DECLINED or NO_CACHE
compile_acts the acts of a compile: name an entry, look it up, load it, or make it
options      check the options of engines, and digest the files that they name
adopting     ask a backend, and take what it offers if the driver believes it
"""
