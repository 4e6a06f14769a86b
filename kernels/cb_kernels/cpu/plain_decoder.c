/* A plain decoder in one call, from token ids to logits: no return to the caller between two of its
   hundred products, and the threads stay together. Bit for bit what the single operations give.

   A layer is norm, QKV, rotation, attention over a paired cache, projection onto the residual; norm,
   gated MLP onto the residual. Behind the last layer's K and V only the wanted tokens go on.
   Everything is bfloat16. */
#if HAS_PAIRS

struct layer { /* mirrored in plain_decoder.py */
    const uint16_t *attention_norm, *mlp_norm;    /* [hidden] */
    const uint16_t *q_norm, *k_norm;              /* [dim], or NULL */
    const uint32_t *qkv, *output, *gate_up, *down; /* panels, of linear.c or linear_int8.c */
    const uint16_t *qkv_bias, *output_bias, *gate_up_bias, *down_bias; /* or NULL */
    const float *qkv_scales, *output_scales, *gate_up_scales, *down_scales; /* NULL: not of bytes */
    int64_t turns;  /* which of the step's cos and sin; -1: none */
    int64_t window; /* 0: all */
};

struct model { /* mirrored in plain_decoder.py */
    const void *embedding; /* [vocab, hidden], or panels of linear.c */
    const uint16_t *norm;  /* [hidden] */
    const uint32_t *head;  /* panels; NULL: the wanted tokens' norms are what is asked for */
    const float *head_scales;
    int64_t embedding_is_packed, vocab, num_layers, hidden, heads, kv_heads, dim, half, width;
    float eps, attention_scale, soft_cap, residual_scale, embedding_scale;
};

struct step { /* mirrored in plain_decoder.py */
    int64_t rows, tokens, num_wanted, table_stride, num_blocks, block_size, block_stride;
    int64_t head_stride;
    const int32_t *table, *starts, *lens;
    const int64_t *slots, *token_ids, *wanted;
    uint16_t *const *k_caches, *const *v_caches;  /* [num_layers] */
    const uint16_t *const *cos, *const *sin;      /* each [positions, dim] */
    uint16_t *x, *kept;                           /* [tokens, hidden], room */
    uint16_t *normed, *qkv, *attended, *gated;    /* and more of it, [tokens, ...] */
    char *rounded;                                /* of the widest x, where weights are of bytes */
    uint16_t *out; /* [num_wanted, vocab], or [num_wanted, hidden]; or NULL, and in its place: */
    int64_t *best; /* [num_wanted], ids of the largest logits; -1 where that is not finite */
};

/* Some tokens on their way through a layer. */
struct tokens {
    int64_t num;
    uint16_t *x, *attended;
};

INLINE void multiply(const struct step *s, int64_t num_rows, const uint16_t *x,
                     const uint32_t *panels, const float *scales, const struct output *o,
                     int64_t num_in, int64_t num_out) {
#if HAS_INT8
    if (scales) {
        struct int8_weight weight = {panels, scales};
        struct int8_output output = {o->bias, o->onto, o->scale, o->gated, 1, o->y, o->width,
                                     o->best};
        int8_linear_by_team(x, num_in, &weight, &output, num_rows, num_in, num_out, s->rounded);
        return;
    }
#endif
    linear_by_team(x, num_in, panels, o, num_rows, num_in, num_out);
}

INLINE void norm_by_team(const uint16_t *x, const uint16_t *weight, uint16_t *y, int64_t num_rows,
                         int64_t width, float eps) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_rows; t++) norm_row(x, weight, y, t * width, width, eps, 1);
}

INLINE void embed_token(const struct model *m, const struct step *s, int64_t t) {
    int64_t id = s->token_ids[t], hidden = m->hidden;
    uint16_t *x = s->x + t * hidden;
    if (m->embedding_is_packed) {
        const uint32_t *pairs = m->embedding;
        pairs += id / PANEL * (hidden / 2) * PANEL + id % PANEL;
        for (int64_t k = 0; k < hidden / 2; k++) memcpy(x + 2 * k, pairs + k * PANEL, 4);
    } else {
        memcpy(x, (const uint16_t *)m->embedding + id * hidden, hidden * 2);
    }
    if (m->embedding_scale != 1.0f)
        for (int64_t i = 0; i < hidden; i += LANES)
            store_bf16(x + i, load_bf16(x + i) * m->embedding_scale);
}

INLINE void prepare_head(const struct model *m, const struct layer *l, const struct step *s,
                         uint16_t *head, const uint16_t *norm, int64_t position) {
    if (norm) norm_row(head, norm, head, 0, m->dim, m->eps, 1);
    if (l->turns >= 0)
        turn_head(head, 0, s->cos[l->turns], s->sin[l->turns], position * m->dim, m->half, 1);
}

/* Norms and turns the q and k of one KV head where they lie, and puts its k and v into the cache. */
INLINE void place_head(const struct model *m, const struct layer *l, const struct step *s,
                       int64_t index, int64_t t, int64_t position, int64_t kv_head) {
    int64_t dim = m->dim, group = m->heads / m->kv_heads, slot = s->slots[t];
    uint16_t *token = s->qkv + t * (m->heads + 2 * m->kv_heads) * dim;
    uint16_t *key = token + (m->heads + kv_head) * dim, *value = key + m->kv_heads * dim;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
        prepare_head(m, l, s, token + h * dim, l->q_norm, position);
    prepare_head(m, l, s, key, l->k_norm, position);
    if (slot < 0) return;
    int64_t base = slot / s->block_size * s->block_stride + kv_head * s->head_stride;
    store_pairs(key, value, s->k_caches[index] + base, s->v_caches[index] + base,
                slot % s->block_size, dim, s->block_size);
}

/* What is planned of a step before the threads start. */
struct plan {
    struct job *jobs, *last_jobs; /* of attention; of the last layer's, those with wanted tokens */
    int64_t num_jobs, num_last_jobs;
    int32_t *positions; /* [tokens] */
    struct best *bests; /* see `answer` */
    char *is_wanted;    /* [tokens] */
    char *is_alone;     /* [tokens]: its row's only one */
};

/* The first half of a layer, up to what attention gives. A decoding token is placed by the jobs that
   attend to it, into a block that has been fetched for them. No other row may read the block that a
   row writes to: rows share only whole blocks that an earlier step has filled. */
INLINE void attend_layer(const struct model *m, const struct layer *l, const struct step *s,
                         int64_t index, const struct plan *plan, const struct problem *p,
                         struct tile *tile) {
    int64_t qkv_width = (m->heads + 2 * m->kv_heads) * m->dim;
    struct output qkv = {l->qkv_bias, NULL, 1.0f, 0, s->qkv, qkv_width, NULL};
    int is_last = index == m->num_layers - 1;
    const struct job *jobs = is_last ? plan->last_jobs : plan->jobs;
    int64_t num_jobs = is_last ? plan->num_last_jobs : plan->num_jobs;
    norm_by_team(s->x, l->attention_norm, s->normed, s->tokens, m->hidden, m->eps);
    multiply(s, s->tokens, s->normed, l->qkv, l->qkv_scales, &qkv, m->hidden, qkv_width);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < s->tokens; t++)
        if (!plan->is_alone[t] || (is_last && !plan->is_wanted[t]))
            for (int64_t h = 0; h < m->kv_heads; h++)
                place_head(m, l, s, index, t, plan->positions[t], h);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_jobs * m->kv_heads; i++) {
        int32_t t = s->starts[jobs[i / m->kv_heads].row];
        if (plan->is_alone[t])
            place_head(m, l, s, index, t, plan->positions[t], i % m->kv_heads);
        attend_job(p, jobs, num_jobs, i, tile, 1, 1);
    }
}

/* The second half: projection and MLP, onto x. */
INLINE void feed_forward(const struct model *m, const struct layer *l, const struct step *s,
                         const struct tokens *t) {
    struct output output = {l->output_bias, t->x, m->residual_scale, 0, t->x, m->hidden, NULL};
    struct output gated = {l->gate_up_bias, NULL, 1.0f, 1, s->gated, m->width, NULL};
    struct output down = {l->down_bias, t->x, m->residual_scale, 0, t->x, m->hidden, NULL};
    multiply(s, t->num, t->attended, l->output, l->output_scales, &output, m->heads * m->dim,
             m->hidden);
    norm_by_team(t->x, l->mlp_norm, s->normed, t->num, m->hidden, m->eps);
    multiply(s, t->num, s->normed, l->gate_up, l->gate_up_scales, &gated, m->hidden,
             2 * m->width);
    multiply(s, t->num, s->gated, l->down, l->down_scales, &down, m->width, m->hidden);
}

/* The wanted tokens side by side; their attention goes where q, k and v have been. */
INLINE struct tokens keep_wanted(const struct model *m, const struct step *s) {
    struct tokens kept = {s->num_wanted, s->kept, s->qkv};
    int64_t q_width = m->heads * m->dim;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < s->num_wanted; i++) {
        memcpy(kept.x + i * m->hidden, s->x + s->wanted[i] * m->hidden, m->hidden * 2);
        memcpy(kept.attended + i * q_width, s->attended + s->wanted[i] * q_width, q_width * 2);
    }
    return kept;
}

/* `bests` [threads, num_wanted], where only the largest logits are asked for. */
INLINE void answer(const struct model *m, const struct step *s, const struct tokens *t,
                   struct best *bests) {
    struct best *own = bests ? bests + omp_get_thread_num() * t->num : NULL;
    for (int64_t i = 0; own && i < t->num; i++) own[i] = no_best();
    norm_by_team(t->x, m->norm, m->head ? s->normed : s->out, t->num, m->hidden, m->eps);
    if (!m->head) return;
    struct output logits = {NULL, NULL, 1.0f, 0, s->out, m->vocab, own};
    multiply(s, t->num, s->normed, m->head, m->head_scales, &logits, m->hidden, m->vocab);
    if (!bests) return;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < t->num; i++)
        s->best[i] = settle_best(bests + i, omp_get_num_threads(), t->num);
}

/* Whether everything that the step names is there. */
static int step_fits(const struct model *m, const struct step *s) {
    for (int64_t t = 0; t < s->tokens; t++)
        if (s->slots[t] >= s->num_blocks * s->block_size || s->token_ids[t] < 0 ||
            s->token_ids[t] >= m->vocab)
            return 0;
    if (s->num_wanted > s->tokens) return 0; /* there is room for no more */
    for (int64_t i = 0; i < s->num_wanted; i++)
        if (s->wanted[i] < 0 || s->wanted[i] >= s->tokens) return 0;
    return 1;
}

static void make_plan(const struct problem *p, const struct step *s, struct plan *plan) {
    plan->num_jobs = make_jobs(p, s->rows, plan->jobs);
    for (int64_t i = 0; i < s->num_wanted; i++) plan->is_wanted[s->wanted[i]] = 1;
    for (int64_t row = 0; row < s->rows; row++)
        for (int32_t t = s->starts[row]; t < s->starts[row + 1]; t++) {
            plan->positions[t] = s->lens[row] - s->starts[row + 1] + t;
            plan->is_alone[t] = s->starts[row + 1] - s->starts[row] == 1;
        }
    plan->num_last_jobs = 0;
    for (int64_t i = 0; i < plan->num_jobs; i++) {
        const struct job *job = &plan->jobs[i];
        int32_t first = s->starts[job->row] + job->first;
        if (memchr(plan->is_wanted + first, 1, job->count))
            plan->last_jobs[plan->num_last_jobs++] = *job;
    }
}

static void run_model(const struct model *m, const struct layer *layers, const struct step *s,
                      const struct problem *shared, const struct plan *plan) {
#pragma omp parallel
    {
        struct tile tile; /* under 0.5 MiB of the thread's stack */
        struct tokens t = {s->tokens, s->x, s->attended};
#pragma omp for schedule(static)
        for (int64_t i = 0; i < s->tokens; i++) embed_token(m, s, i);
        for (int64_t i = 0; i < m->num_layers; i++) {
            struct problem p = *shared;
            p.k = s->k_caches[i], p.v = s->v_caches[i], p.window = layers[i].window;
            attend_layer(m, &layers[i], s, i, plan, &p, &tile);
            if (i == m->num_layers - 1) t = keep_wanted(m, s);
            feed_forward(m, &layers[i], s, &t);
        }
        answer(m, s, &t, plan->bests);
    }
}

/* 0; 1 when memory ran out; 2 for a block, a slot, a token id or a wanted token that is not there.
   Nothing is written then. */
int cb_plain_decoder(const struct model *m, const struct layer *layers, const struct step *s) {
    if (!step_fits(m, s)) return 2;
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
    struct plan plan = {
        .jobs = malloc(2 * (s->tokens + 1) * sizeof(struct job)),
        .positions = malloc((s->tokens + 1) * sizeof(int32_t)),
        .is_wanted = calloc(2 * (s->tokens + 1), 1),
    };
    int64_t num_bests = s->out ? 0 : omp_get_max_threads() * s->num_wanted;
    if (num_bests) plan.bests = aligned_alloc(64, num_bests * sizeof(struct best));
    int status = !plan.jobs || !plan.positions || !plan.is_wanted || (num_bests && !plan.bests);
    if (!status) {
        plan.last_jobs = plan.jobs + s->tokens + 1;
        plan.is_alone = plan.is_wanted + s->tokens + 1;
        make_plan(&shared, s, &plan);
        run_model(m, layers, s, &shared, &plan);
    }
    free(plan.jobs), free(plan.positions), free(plan.is_wanted), free(plan.bests);
    return status;
}

#endif
