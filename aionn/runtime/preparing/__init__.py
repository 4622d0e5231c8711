"""A model gets ready on a device: from the cache if it can, compiled if it must.

preparation  one model on one device: HIT, MISS, DECLINED or NO_CACHE
plan         which device prepares the model
renewal      keeps the model of a compilation prepared: at the first use, and anew when its driver has died
background   the same in a worker process at the lowest priority
"""
