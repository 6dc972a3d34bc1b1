"""`twostroke chat`: a conversation in a terminal, or one question.

server        a client over HTTP or gRPC, which streams answers and asks for the recommended sampling
conversation  the messages so far, and the commands that begin with a slash
prompt        reads a line, with line editing and a history
"""
