"""Faults of where values lie in a block, and of metadata that a second group of layers updates."""

from dataclasses import replace

from attncheck.backends.mutants.plain import Base, PlainBuilder, PlainImpl


class ValueHalfAPageBehind(Base):
    """Finds the values of a block in its middle: wrong if the block holds more than keys and values of one layer."""

    packing = "split_second"

    class Impl(PlainImpl):
        def _cache_views(self, kv_cache):
            keys, values = super()._cache_views(kv_cache)
            if keys.shape[3] != values.shape[3]:
                return keys, values
            middle = keys.storage_offset() + keys.stride(0) // 2
            return keys, values.as_strided(values.shape, values.stride(), middle)


ValueHalfAPageBehind.Impl.backend = ValueHalfAPageBehind  # an impl reads the packing of its backend


class Updates(Base):
    """Correct backend whose metadata a second group can use with another block table and other slots."""

    class Builder(PlainBuilder):
        supports_update_block_table = True

        def update_block_table(self, metadata, blk_table, slot_mapping):
            common = replace(metadata.common, block_table_tensor=blk_table, slot_mapping=slot_mapping)
            return replace(metadata, common=common)


class UpdatesInPlace(Updates):
    """``update_block_table`` changes the metadata that it gets: the first group then reads the second's pages."""

    class Builder(Updates.Builder):
        def update_block_table(self, metadata, blk_table, slot_mapping):
            metadata.common = super().update_block_table(metadata, blk_table, slot_mapping).common
            return metadata


class UpdatesKeepTheSlots(Updates):
    """``update_block_table`` exchanges the table alone: the second group writes to the first one's slots."""

    class Builder(Updates.Builder):
        def update_block_table(self, metadata, blk_table, slot_mapping):
            return super().update_block_table(metadata, blk_table, metadata.common.slot_mapping)
