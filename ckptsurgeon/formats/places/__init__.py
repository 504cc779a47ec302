"""Where families keep alike what lies in or beside their shards."""
