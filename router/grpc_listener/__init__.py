"""The clients' gRPC port, in a process of its own that stands before the router's gRPC server.

gRPC parses and queues what a client sends before it asks anybody: frames that ask for nothing, header fields without
end, calls that are reset as soon as they have begun. The process reads the heads of the frames that pass, and nothing
else of them, and does three things about such clients:

connection_cost  each connection has credit. Frames and calls that come to nothing take from it, answers and time give
                 it back. Where none is left, the connection is read as slowly as time gives credit. To cut it would
                 end the other calls of an honest one, and a hostile one would come again with the credit of a newcomer
call_window      few calls are passed on before the router has looked at those before, and connections take turns
connection       what a client does not read is not asked for, and while it does not read, nothing of it is taken

frames           the heads of HTTP/2 frames
listener         the loop: clients come, have their turns, and make room
client_names     tells the router whose connection it serves
process          the program, with TLS where clients speak it
running          the router's side: it starts the program, again where it ends, and says what it has looked at
"""
