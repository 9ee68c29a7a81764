"""The technique `chunked_cross_entropy`."""
