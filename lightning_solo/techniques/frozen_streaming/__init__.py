"""The technique `frozen_streaming`."""
