"""Chunks of packed sequences: bounds and prefixes by hand."""

from hone.models.attention.chunks import chunks, pieces


def test_a_chunk_goes_on_from_a_shared_prefix_that_ends_inside_it():
    """Chunks of 6: a sequence of 13; a prefix of 8 with two answers of 5 and 3; a prefix of 6 with one of 2."""
    ends, parents = chunks((13, 8, 5, 3, 6, 2), (None, None, 1, 1, None, 4), 6)
    assert ends == [0, 6, 12, 13, 19, 21, 25, 26, 29, 35, 37]
    assert parents == [None, None, None, None, None, 4, None, 4, None, None]


def test_queries_are_cut_at_the_ends_of_chunks_and_blocks():
    assert list(pieces(0, 10, 4, None)) == [(0, 4), (4, 8), (8, 10)]
    assert list(pieces(8, 10, 100, 6)) == [(0, 4), (4, 10)]  # positions 8 to 17: chunks end at 12 and 18
    assert list(pieces(8, 10, 3, 6)) == [(0, 3), (3, 4), (4, 6), (6, 9), (9, 10)]
