"""The gateway as a client of somebody's broker: AMQP 0-9-1 and MQTT, the two that zeroctl's nodes use. Uses the codec's
rules and the bus."""
