"""What serves a compilation now, and how another prepared model takes its place.

Each file imports files on lower lines only.

serving         `Serving` and `Use`: one prepared model with its users, and how much the app uses a compilation
                `CompiledModel`: the prepared model of the moment, and the swap, a two-phase commit over members behind a gate
planned_model   `PlannedModel`: the steps of a plan, prepared on several devices, as one prepared model
planned_execution  `PlannedExecution`: one execution of a plan, as one request per step
boundaries      `Wiring`: which tensors of a plan go where; and where those between the steps lie, in the frame of an execution
"""
