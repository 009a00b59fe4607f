"""Multi-head latent attention by attncheck's own Triton kernel: every row is computed in the latent space.

The query is projected into the space of the cache rows. There all heads share one key per token, whose first part is
also the value. The result is projected back. This is cheapest for few new rows, and correct for any number. Nothing is
imported here, so that the backend's name and declarations are available without Triton.
"""
