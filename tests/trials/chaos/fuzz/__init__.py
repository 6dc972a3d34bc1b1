"""Bytes from anybody, at every parser and port: `make fuzz ARGS="--for 3600"`; the gate replays the corpus.

target     one parser or port: what may be sent, how to change it, and what must hold afterwards
mutate     changes to bytes, to trees (msgpack, JSON) and to protobuf messages
wire       a connection whose other end has said all that it will say
parsers    the parsers, one by one         servers    whole servers behind real sockets
engine     runs one target for a while, with atheris where it is installed
"""
