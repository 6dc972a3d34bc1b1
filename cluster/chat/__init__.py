"""`twostroke chat`: a conversation in a terminal, or one question.

server        one client over HTTP or gRPC: streams an answer, knows what sampling the model recommends
conversation  the messages so far, and the commands that begin with a slash
prompt        reads what is typed: line editing, history
screen        shows an answer while it comes: words are not cut, Markdown is highlighted, nothing is lost
"""
