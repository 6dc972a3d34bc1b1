"""The APIs that clients speak: each dialect is a package here, and a line in `table`.

A dialect turns a request's body into an `AnswerRequest`, and the events of the answer into a response (`reply`). It
opens no connection.
"""
