"""From and to the formats of other libraries."""
