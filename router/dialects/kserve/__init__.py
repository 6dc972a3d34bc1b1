"""KServe's protocol v2, as Triton's clients speak it: tensors over gRPC, and text in JSON over HTTP.

Triton's vLLM backend and Dynamo name the inputs and outputs of a language model differently. Both dialects are read
here (`schema`, `fields`); which one a request is in decides what its responses hold. `tensors` and `infer` are the
messages of gRPC, `reply` is HTTP. `router/kserve` serves them.
"""
