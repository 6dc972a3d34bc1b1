"""One step of one model on one device: pages, batch, runner, sampler, and the thread that alone touches the device."""
