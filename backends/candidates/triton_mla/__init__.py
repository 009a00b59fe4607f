"""Multi-head latent attention by a Triton kernel of attncheck's own: every row is answered in the latent space.

The query is brought into the space of the cache rows, where all heads share one key a token, whose first part is the
value as well; what comes out is brought back. It is cheapest where there are few new rows, and right for any. Nothing
is imported here: who asks for the backend's name or declarations needs no Triton.
"""
