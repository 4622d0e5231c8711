"""ONNX file <-> `Model`: large constants go out into pools, the rest stays the standard's own protobuf.

`reading` never parses a weight. `wire` walks the file's protobuf down to the tensors and leaves out each large `raw_data`.
The `onnx` package then parses a few kilobytes. A loaded model (`read_content` over an `OpenFile`) leaves each weight in its file. For a
model that is read whole (`read_onnx`), each weight is copied once, from the source into the pool. So such a model needs its own size
twice for a moment (source and pool), not four times (source, message, Python bytes, pool).

    wire       finds tensors in a serialized model, and leaves large ones out
    files      the model's file and those beside it: opened, read by ranges, compared with what they were
    digest     a model's token, made without the `onnx` package and remembered; the files of a model for another machine
    constants  takes large constants out of the graph and puts them back (`embed_constants`)
    arrays     shows constants as arrays where they lie; `unchanged` copies those that may change, and digests the copies
    checking   says what is wrong with a graph, node by node, and reads the types of sequences, maps and optionals at the border
    support    asks an engine operator by operator
    shapes     resolves open dimensions
    opaque     makes models of other formats, which have no graph
    steps      the parts of a model that several devices run one after the other: tokens, lifetimes and places of what lies between
    cutting    cuts a model into steps, and makes each step a model of its own
    rows       which operators mix the rows of a batch
    flow       what each operation reads and makes
    reading    joins them

What changes in the graph, and nothing else does
    Every large constant is an EXTERNAL initializer of the main graph (location "pool:<index>", offset, length).
    Those of `Constant` nodes and of nested graphs (If, Loop, Scan) are hoisted there, renamed where their name is taken.
    A hoisted constant that is an output of its graph leaves an Identity behind: a graph makes its own outputs.
    Large constants that nothing reads are gone.
    A node without a name gets one ("Conv_3"), so every engine's complaint can name it.
    Initializers are left out of the graph's inputs, and the IR version is at least 4, so a constant has one fixed value.
    An initializer that an app may override (`constants`) is an input instead, and the app's side knows its default.
    Constants whose element type NumPy lacks (int4, bfloat16, string) stay inline.
    Every tensor that stays carries its own bytes, also where a file held them: functions, attributes, sparse initializers. So an
    engine never looks for a file.

Used by runtime.model (reading) and the engines (`constant_arrays`, `embed_constants`, `settle_exported`, `resolve_shapes`). `onnx`
costs 50 ms, so the modules that need it say so: who only looks at arrays does without.
"""
