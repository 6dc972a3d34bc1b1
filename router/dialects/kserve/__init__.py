"""KServe's protocol v2, as Triton's clients speak it over gRPC and HTTP.

Triton's vLLM backend and Dynamo name the inputs and outputs of a language model differently. Both forms are read
(`schema`, `fields`), and the form of a request decides which outputs its responses have. `infer` reads and writes the
messages of gRPC, `infer_json` the same tensors over HTTP, and `reply` writes the JSON of `generate`. The gRPC service
and the pages about models are in `router/kserve`.
"""
