"""`twostroke doctor`: one chat sent twice through the router; was the second one's prompt reused, and if not, why?

facts       what was seen: frozen values                    diagnosis   facts -> verdict: pure
endpoints   the chat over gRPC or HTTP                      examine     sends, watches the index, collects the facts
branches    what features have to say of a worker
"""
