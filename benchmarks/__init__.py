"""What proxmo is measured with, beside torch and beside its peers."""

import os

# The threads of NumPy's BLAS go on for tens of milliseconds after a call, waiting for the next one, and would take the
# cores of whatever candidate comes after. So they stop after 2^16 cycles, which is still longer than the pauses within
# a call. NumPy reads this when it is loaded, so it has to be here.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")
