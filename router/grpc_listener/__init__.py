"""The clients' gRPC port: a proxy in a process of its own, before the router's gRPC server.

gRPC parses and queues all that a client sends before it calls any handler: frames that request nothing, header fields
without end, calls that are reset as soon as they begin. This process reads only the heads of the frames that pass, and
bounds the work for such clients in three ways:

connection_cost  each connection has credit. Useless frames and calls take from it, answers and time add to it.
                 Without credit, a connection is read as slowly as time adds some. It is not cut: an honest client
                 would lose its other calls, and a hostile one would connect again and have a new connection's credit
call_window      few calls wait to be handled by the router at a time, and connections take turns
connection       while a client does not read, nothing more is read from it or for it

frames           the heads of HTTP/2 frames
listener         the loop: it accepts clients, gives them their turns, and closes some when there are too many
client_names     tells the router whose connection it serves
process          the program's entry, with TLS where clients use it
running          the router's side: it starts the program, restarts it when it ends, and reports handled calls
"""
