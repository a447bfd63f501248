"""Name tables for well-known checkpoints.

Owns finding, reading and guessing tables; the tables themselves are the TOML files in ``tables/``, and
a table of your own is one file of that form, read by ``NameTable.load``. Nothing is read before it is
asked for, and no array is ever looked into: paths and shapes are enough.

The words: ``vocab embed mlp experts heads kv_heads`` for what they say (``heads`` and ``kv_heads`` are
the number of heads times their size), ``qkv`` for q, k and v in one dimension, ``norm`` for every scale
or bias of a norm, ``position``, ``lora_rank`` (also the latents of latent attention), ``groups`` of
quantised values, ``in_channels out_channels conv_h conv_w`` of convolutions. ``None`` stands for sizes
that are no axis of the model: classes, buckets, masks. A word that an array has twice is ``_out`` the
second time. Every preset knows all of them, so plan with ``unmapped="error"``.

What is fused is marked, and ``plan.report`` says where a plan splits it (``cuts_fused``; ``splits_heads``
where that depends on the number of heads, which no shape tells). What is quantised in groups is split in
whole groups alone: ``indivisible=`` says what happens where they do not divide.
"""

from axisrules.catalog._guess import Guess as Guess
from axisrules.catalog._guess import guess as guess
from axisrules.catalog._tables import load as load
from axisrules.catalog._tables import names as names
