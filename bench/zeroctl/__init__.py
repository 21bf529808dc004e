"""The gateway's zeroctl beside RabbitMQ's topic exchange."""
