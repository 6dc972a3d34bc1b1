"""Speculation: what proposes the next tokens of an answer, and how likely they are to be right.

Whatever is proposed, the sampler decides (`twostroke.engine.sampling.sampler`): a drafted token is kept where the
sampler draws the same one. So nothing in this package changes an answer, only how many steps it takes.
"""
