"""What a client wants generated, and its answer on the way back from tokens to text.

`params` is the request, whichever dialect it came in, with the checks that need the model's facts. `request_handler`
passes its prompts to the dispatcher; `request_output` makes text of the tokens that come back, takes it apart into
reasoning, tool calls and the rest, and applies stop strings. `resume` lets a client continue with a broken stream.
"""
