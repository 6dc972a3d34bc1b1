"""`twostroke doctor`: one chat sent twice through the router; was the second one's prompt reused, and if not, why?

facts       what was seen: frozen values                    diagnosis   facts -> verdict: pure
endpoints   the chat over gRPC or HTTP                      watch       what the router's index says meanwhile
scrape      single values of /metrics pages                 examine     sends, watches, collects the facts
"""
