"""Operations on a paged KV cache. Each has a plain torch reference; knows nothing of cb_backend."""
