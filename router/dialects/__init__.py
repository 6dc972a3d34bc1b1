"""The forms in which clients ask and are answered: one package each, and a line in `table`.

A dialect makes an `AnswerRequest` of a body, and bytes of the events of its answer (`reply`). It opens no connection.
"""
