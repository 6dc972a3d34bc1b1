"""Bytes from anybody, at every door: `make fuzz ARGS="--for 3600"`; the gate replays the corpus and fuzzes a moment.

target     one door: what may be sent, how to change it, and what must hold afterwards
mutate     changes to bytes, to trees (msgpack, JSON) and to protobuf messages
wire       a connection whose other end has said all that it will say
doors      the parsers, one by one         servers    whole servers behind real sockets
engine     plays one target for a while, with atheris where it is installed
"""
