"""One execution: where its arguments lie, how it is sent, what it holds until the driver has answered.

arguments      shapes and types checked, and the layout of a frame for them
frames         the frames of a burst or a compilation, by size
link           a burst's connection to one driver
placement      arguments that do not lie in the frame
device_memory  a tensor that lives in the driver
moving         a device memory's copy in another driver, at a swap
recurrent      the short way of a stream that keeps its state in the driver
"""
