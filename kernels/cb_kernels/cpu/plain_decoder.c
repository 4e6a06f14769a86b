/* A plain decoder in one call, from token ids to logits: no return to the caller between two of its
   hundred products. Bit for bit what the single operations give. Workers compute it, and the caller
   joins them when there is nothing else to do.

   A layer is norm, QKV, rotation, attention over a paired cache, projection onto the residual; norm,
   gated MLP onto the residual. Behind the last layer's K and V only the wanted tokens go on.
   Everything is bfloat16. */
#include "workers.c"

#define TOKENS_AT_ONCE 4 /* of small work */

struct layer { /* mirrored in plain_decoder.py */
    const uint16_t *attention_norm, *mlp_norm;    /* [hidden] */
    const uint16_t *q_norm, *k_norm;              /* [dim], or NULL */
    const void *qkv, *output, *gate_up, *down; /* packed, for linear.c or linear_int8.c */
    const uint16_t *qkv_bias, *output_bias, *gate_up_bias, *down_bias; /* or NULL */
    const float *qkv_scales, *output_scales, *gate_up_scales, *down_scales; /* NULL: not of bytes */
    int64_t turns;  /* which of the step's cos and sin; -1: none */
    int64_t window; /* 0: all */
};

struct model { /* mirrored in plain_decoder.py */
    const void *embedding; /* [vocab, hidden], or a packed head */
    const uint16_t *norm;  /* [hidden] */
    const void *head;      /* packed; NULL: the wanted tokens' norms are what is asked for */
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

INLINE void multiply(struct member *me, const struct step *s, int64_t num_rows, const uint16_t *x,
                     const void *packed, const float *scales, const struct output *o,
                     int64_t num_in, int64_t num_out) {
#if HAS_INT8
    if (scales) {
        struct int8_weight weight = {packed, scales};
        struct int8_output output = {o->bias, o->onto, o->scale, o->gated, 1, o->y, o->width,
                                     o->best};
        int8_linear_by_team(me, x, num_in, &weight, &output, num_rows, num_in, num_out, s->rounded);
        return;
    }
#endif
    linear_by_team(me, x, num_in, packed, o, num_rows, num_in, num_out);
}

INLINE void norm_by_team(struct member *me, const uint16_t *x, const uint16_t *weight, uint16_t *y,
                         int64_t num_rows, int64_t width, float eps) {
    FOR_JOBS(t, me, num_rows, TOKENS_AT_ONCE) norm_row(x, weight, y, t * width, width, eps, 1);
}

INLINE void embed_token(const struct model *m, const struct step *s, int64_t t) {
    int64_t id = s->token_ids[t], hidden = m->hidden;
    uint16_t *x = s->x + t * hidden;
    if (m->embedding_is_packed)
        unpack_output(m->embedding, id, hidden, x);
    else
        memcpy(x, (const uint16_t *)m->embedding + id * hidden, hidden * 2);
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
INLINE void attend_layer(struct member *me, const struct model *m, const struct layer *l,
                         const struct step *s, int64_t index, const struct plan *plan,
                         const struct problem *p, struct tile *tile) {
    int64_t qkv_width = (m->heads + 2 * m->kv_heads) * m->dim;
    struct output qkv = {l->qkv_bias, NULL, 1.0f, 0, s->qkv, qkv_width, NULL};
    int is_last = index == m->num_layers - 1;
    const struct job *jobs = is_last ? plan->last_jobs : plan->jobs;
    int64_t num_jobs = is_last ? plan->num_last_jobs : plan->num_jobs;
    norm_by_team(me, s->x, l->attention_norm, s->normed, s->tokens, m->hidden, m->eps);
    multiply(me, s, s->tokens, s->normed, l->qkv, l->qkv_scales, &qkv, m->hidden, qkv_width);
    FOR_JOBS(t, me, s->tokens, TOKENS_AT_ONCE)
        if (!plan->is_alone[t] || (is_last && !plan->is_wanted[t]))
            for (int64_t h = 0; h < m->kv_heads; h++)
                place_head(m, l, s, index, t, plan->positions[t], h);
    FOR_JOBS(i, me, num_jobs * m->kv_heads, 1) {
        int32_t t = s->starts[jobs[i / m->kv_heads].row];
        if (plan->is_alone[t])
            place_head(m, l, s, index, t, plan->positions[t], i % m->kv_heads);
        attend_job(p, jobs, num_jobs, i, me->team->size, tile, 1, 1);
    }
}

/* The second half: projection and MLP, onto x. */
INLINE void feed_forward(struct member *me, const struct model *m, const struct layer *l,
                         const struct step *s, const struct tokens *t) {
    struct output output = {l->output_bias, t->x, m->residual_scale, 0, t->x, m->hidden, NULL};
    struct output gated = {l->gate_up_bias, NULL, 1.0f, 1, s->gated, m->width, NULL};
    struct output down = {l->down_bias, t->x, m->residual_scale, 0, t->x, m->hidden, NULL};
    multiply(me, s, t->num, t->attended, l->output, l->output_scales, &output, m->heads * m->dim,
             m->hidden);
    norm_by_team(me, t->x, l->mlp_norm, s->normed, t->num, m->hidden, m->eps);
    multiply(me, s, t->num, s->normed, l->gate_up, l->gate_up_scales, &gated, m->hidden,
             2 * m->width);
    multiply(me, s, t->num, s->gated, l->down, l->down_scales, &down, m->width, m->hidden);
}

/* The wanted tokens side by side; their attention goes where q, k and v have been. */
INLINE struct tokens keep_wanted(struct member *me, const struct model *m, const struct step *s) {
    struct tokens kept = {s->num_wanted, s->kept, s->qkv};
    int64_t q_width = m->heads * m->dim;
    FOR_JOBS(i, me, s->num_wanted, TOKENS_AT_ONCE) {
        memcpy(kept.x + i * m->hidden, s->x + s->wanted[i] * m->hidden, m->hidden * 2);
        memcpy(kept.attended + i * q_width, s->attended + s->wanted[i] * q_width, q_width * 2);
    }
    return kept;
}

/* `bests` [members, num_wanted], where only the largest logits are asked for. */
INLINE void answer(struct member *me, const struct model *m, const struct step *s,
                   const struct tokens *t, struct best *bests) {
    struct best *own = bests ? bests + me->number * t->num : NULL;
    norm_by_team(me, t->x, m->norm, m->head ? s->normed : s->out, t->num, m->hidden, m->eps);
    if (!m->head || me->leaves_early) return;
    struct output logits = {NULL, NULL, 1.0f, 0, s->out, m->vocab, own};
    multiply(me, s, t->num, s->normed, m->head, m->head_scales, &logits, m->hidden, m->vocab);
    if (!bests) return;
    FOR_JOBS(i, me, t->num, 1)
        s->best[i] = settle_best(bests + i, me->team->size, t->num);
}

/* A step under way, and all that it needs. */
struct run {
    struct call call;
    const struct model *model;
    const struct layer *layers;
    struct step step;
    struct problem problem;
    struct plan plan;
    struct stage *stages;
};

#define STAGES_OF_A_LAYER 12 /* at most: 2 norms, 4 products of 2 each, placing, attention */
#define OTHER_STAGES 6       /* embedding, wanted tokens, norm, head of 2, largest logits */

static void walk_model(const void *what, struct member *me) {
    const struct run *run = what;
    const struct model *m = run->model;
    const struct step *s = &run->step;
    struct tile tile; /* under 0.5 MiB of the thread's stack */
    struct tokens t = {s->tokens, s->x, s->attended};
    FOR_JOBS(i, me, s->tokens, TOKENS_AT_ONCE) embed_token(m, s, i);
    for (int64_t i = 0; i < m->num_layers; i++) {
        struct problem p = run->problem;
        p.k = s->k_caches[i], p.v = s->v_caches[i], p.window = run->layers[i].window;
        attend_layer(me, m, &run->layers[i], s, i, &run->plan, &p, &tile);
        if (i == m->num_layers - 1) t = keep_wanted(me, m, s);
        feed_forward(me, m, &run->layers[i], s, &t);
    }
    answer(me, m, s, &t, run->plan.bests);
}
