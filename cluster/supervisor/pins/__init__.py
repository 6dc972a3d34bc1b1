"""Pins of the fleet: the supervisor remembers them, and gives them to every worker that is to hold them.

They are stored in Ray, as incarnations are, so that they outlive supervisor, routers and workers. A worker gets its
pins when it begins to serve or a supervisor does, and lets go what is not stored: a supervisor may die between the two.
A new pin that one of its workers refuses is held by none. A worker that does not answer is given it again and again,
until it holds or refuses it, or its epoch ends.

What is wanted changes in one turn of the event loop, without waiting for anybody. Then the workers are brought to it,
all at once, with one call after the other to each. What a call is to do is looked up when its turn has come. So a
worker that does not answer delays no other worker, and no command but those that it takes part in.

service  answers the calls that put, remove and list pins
wanted   holds the pins that the fleet is to have, and says which worker holds which
giving   brings workers to what is wanted
"""
