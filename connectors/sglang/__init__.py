"""kvferry as SGLang's transfer backend: `--disaggregation-transfer-backend kvferry`, in engines that have this package
installed. `plugin` is what SGLang loads; nothing else of it is imported before the backend is asked for."""
