/* All layers of a plain decoder in one call: no return to the caller between two of its hundred
   products, and the threads stay together. Bit for bit what the single operations give.

   A layer is norm, QKV, rotation, attention over a paired cache, projection onto the residual; norm,
   gated MLP onto the residual. Everything is bfloat16. */
#if HAS_PAIRS

struct layer { /* mirrored in layer_stack.py */
    const uint16_t *attention_norm, *mlp_norm;    /* [hidden] */
    const uint16_t *q_norm, *k_norm;              /* [dim], or NULL */
    const uint32_t *qkv, *output, *gate_up, *down; /* panels, of linear.c or linear_int8.c */
    const uint16_t *qkv_bias, *output_bias, *gate_up_bias, *down_bias; /* or NULL */
    const float *qkv_scales, *output_scales, *gate_up_scales, *down_scales; /* NULL: not of bytes */
    int64_t turns;  /* which of the step's cos and sin; -1: none */
    int64_t window; /* 0: all */
};

struct shape { /* mirrored in layer_stack.py */
    int64_t num_layers, hidden, heads, kv_heads, dim, half, width;
    float eps, attention_scale, soft_cap, residual_scale;
};

struct step { /* mirrored in layer_stack.py */
    int64_t rows, tokens, table_stride, num_blocks, block_size, block_stride, head_stride;
    const int32_t *table, *starts, *lens;
    const int64_t *slots;
    uint16_t *const *k_caches, *const *v_caches;  /* [num_layers] */
    const uint16_t *const *cos, *const *sin;      /* each [tokens, dim] */
    uint16_t *x;                                  /* [tokens, hidden], in and out */
    uint16_t *normed, *qkv, *attended, *gated;    /* room for what comes between */
    char *rounded;                                /* of the widest x, where weights are of bytes */
};

INLINE void multiply(const struct step *s, const uint16_t *x, const uint32_t *panels,
                     const float *scales, const struct output *o, int64_t num_in,
                     int64_t num_out) {
#if HAS_INT8
    if (scales) {
        struct int8_weight weight = {panels, scales};
        struct int8_output output = {o->bias, o->onto, o->scale, o->gated, 1, o->y, o->width};
        int8_linear_by_team(x, num_in, &weight, &output, s->tokens, num_in, num_out, s->rounded);
        return;
    }
#endif
    linear_by_team(x, num_in, panels, o, s->tokens, num_in, num_out);
}

INLINE void norm_by_team(const struct step *s, const uint16_t *weight, int64_t width, float eps) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < s->tokens; t++)
        norm_row(s->x, weight, s->normed, t * width, width, eps, 1);
}

/* Norms and turns a token's q and k where they lie, and puts k and v into the cache. */
INLINE void place_token(const struct shape *m, const struct layer *l, const struct step *s,
                        int64_t index, int64_t t) {
    int64_t dim = m->dim, num_qk = m->heads + m->kv_heads;
    uint16_t *token = s->qkv + t * (num_qk + m->kv_heads) * dim;
    for (int64_t h = 0; h < num_qk; h++) {
        const uint16_t *norm = h < m->heads ? l->q_norm : l->k_norm;
        if (norm) norm_row(token, norm, token, h * dim, dim, m->eps, 1);
        if (l->turns >= 0)
            turn_head(token, h * dim, s->cos[l->turns], s->sin[l->turns], t * dim, m->half, 1);
    }
    if (s->slots[t] < 0) return;
    int64_t block = s->slots[t] / s->block_size, offset = s->slots[t] % s->block_size;
    for (int64_t h = 0; h < m->kv_heads; h++) {
        int64_t base = block * s->block_stride + h * s->head_stride;
        store_pairs(token + (m->heads + h) * dim, token + (num_qk + h) * dim,
                    s->k_caches[index] + base, s->v_caches[index] + base, offset, dim,
                    s->block_size);
    }
}

INLINE void run_layer(const struct shape *m, const struct layer *l, const struct step *s,
                      int64_t index, const struct problem *p, const struct job *jobs,
                      int64_t num_jobs, struct tile *tile) {
    int64_t q_width = m->heads * m->dim, qkv_width = q_width + 2 * m->kv_heads * m->dim;
    struct output qkv = {l->qkv_bias, NULL, 1.0f, 0, s->qkv, qkv_width};
    struct output output = {l->output_bias, s->x, m->residual_scale, 0, s->x, m->hidden};
    struct output gated = {l->gate_up_bias, NULL, 1.0f, 1, s->gated, m->width};
    struct output down = {l->down_bias, s->x, m->residual_scale, 0, s->x, m->hidden};
    norm_by_team(s, l->attention_norm, m->hidden, m->eps);
    multiply(s, s->normed, l->qkv, l->qkv_scales, &qkv, m->hidden, qkv_width);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < s->tokens; t++) place_token(m, l, s, index, t);
    attend_by_team(p, jobs, num_jobs, tile, 1, 1);
    multiply(s, s->attended, l->output, l->output_scales, &output, q_width, m->hidden);
    norm_by_team(s, l->mlp_norm, m->hidden, m->eps);
    multiply(s, s->normed, l->gate_up, l->gate_up_scales, &gated, m->hidden, 2 * m->width);
    multiply(s, s->gated, l->down, l->down_scales, &down, m->width, m->hidden);
}

/* 0; 1 when memory ran out; 2 for a block or a slot that is not there. Nothing is written then. */
int cb_layers(const struct shape *m, const struct layer *layers, const struct step *s) {
    for (int64_t t = 0; t < s->tokens; t++)
        if (s->slots[t] >= s->num_blocks * s->block_size) return 2;
    struct problem shared = {
        .q = s->qkv,
        .out = s->attended,
        .table = s->table,
        .starts = s->starts,
        .lens = s->lens,
        .q_stride = (m->heads + 2 * m->kv_heads) * m->dim,
        .table_stride = s->table_stride,
        .block_stride = s->block_stride,
        .head_stride = s->head_stride,
        .heads = m->heads,
        .kv_heads = m->kv_heads,
        .dim = m->dim,
        .block_size = s->block_size,
        .scale = m->attention_scale,
        .soft_cap = m->soft_cap,
    };
    for (int64_t i = 0; i < m->num_layers; i++) {
        shared.window = layers[i].window;
        if ((i == 0 || layers[i].window != layers[i - 1].window) &&
            !tables_fit(&shared, s->rows, s->num_blocks))
            return 2;
    }
    struct job *jobs = malloc((s->tokens + 1) * sizeof *jobs);
    if (!jobs) return 1;
    int64_t num_jobs = make_jobs(&shared, s->rows, jobs);
#pragma omp parallel
    {
        struct tile tile; /* under 0.5 MiB of the thread's stack */
        for (int64_t i = 0; i < m->num_layers; i++) {
            struct problem p = shared;
            p.k = s->k_caches[i], p.v = s->v_caches[i], p.window = layers[i].window;
            run_layer(m, &layers[i], s, i, &p, jobs, num_jobs, &tile);
        }
    }
    free(jobs);
    return 0;
}

#endif
