"""A model gets ready on a device: from the cache if it can, compiled if it must.

plan         which device prepares the model, or which devices
partition    cut a model over several devices, prepare each step as a model, and keep the plan with the cache
kept_model   keep the model of a compilation prepared: at the first use, and anew after its driver has died or after idle time
background   make a better stage behind the stream: ask a backend, or have a worker at the lowest priority compile it
preparation  one model on one device: HIT, MISS, DECLINED or NO_CACHE
compile_acts the acts of a compile: name an entry, look it up, load it, or make it; and store a better artifact that comes later
options      check the options of engines, and digest the files that they name
adopting     ask a backend, and take what it offers if the driver believes it
"""
