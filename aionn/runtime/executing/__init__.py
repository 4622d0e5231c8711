"""One execution: where its arguments lie, how it is sent, what it holds until the driver has answered.

admission       how many executions of one compilation may wait, and which one more is refused
execution       `Execution`: one execution, from its arguments to its outputs, and what executions are counted as
transitions     the states of an execution, and which act leads from one to another
event           `Event`: a started execution and its fence, as an app uses it
fenced_plan     a started execution of a plan: its steps wait for each other in their drivers
dependencies    what a started execution depends on, and what others rely on
control         the control call as a channel, and executions with strings, sequences, maps and optionals
link            a burst's queues as a channel: its connection to one driver
placement       arguments that do not lie in the frame
device_memory   `DeviceMemory`: a tensor that lives in the driver, as an app allocates and uses it
device_state    what uses a device memory now, and how the memory moves to another driver at a swap
device_buffers  which inputs and outputs a device memory may stand for, and its two buffers
fallback        an execution that failed, once more on another device
retrying        calls without state, made again after their driver has died
warming         runs that nothing counts, on inputs that are made up for a model that no app has given inputs yet
frames          the frames of a burst, by size: allocated as needed, waited for in order, given back when superfluous
arguments       shapes and types checked, the layout of a frame for one set of shapes, and the outputs in it
"""
