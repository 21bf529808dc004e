"""Nothing but the session that all Spark tests share."""

from tests.spark.conftest import spark

__all__ = ["spark"]
