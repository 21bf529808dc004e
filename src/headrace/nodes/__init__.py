"""zeroctl's nodes: who this gateway is among them, whom it has heard, and the services that it provides. Uses the codec
and the bus; opens no sockets."""
