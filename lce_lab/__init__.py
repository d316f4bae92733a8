"""The laboratory: what studies the engine. Built on the public face alone; the engine never imports it."""
