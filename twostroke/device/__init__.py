"""Page memory on a device, and copies between it and the host.

memory   pages as one tensor       staging  pages to and from the host, through page-locked buffers
sharing  with other processes      stream   copies in order, which the host waits for only where it must
"""
