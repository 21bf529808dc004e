"""The sink: rolls, commits and names Parquet files."""
