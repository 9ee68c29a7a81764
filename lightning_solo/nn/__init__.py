"""Find a module's repeated blocks, layers and output heads, and replace their computation."""

from lightning_solo.nn.block_sparse import block_sparse_attention as block_sparse_attention
from lightning_solo.nn.cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from lightning_solo.nn.sliding_window import sliding_window_attention as sliding_window_attention
