/* A plain decoder's step from its beginning to its end: what must be there before the workers start,
   and what is planned for them. */
#include "plain_decoder.c"

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

static void free_run(struct run *run) {
    free(run->plan.jobs), free(run->plan.positions), free(run->plan.is_wanted);
    free(run->plan.bests), free(run->stages), free(run);
}

/* With all the room that it needs; NULL when memory ran out. */
static struct run *new_run(const struct model *m, const struct step *s, int size) {
    int64_t num_bests = s->out ? 0 : size * s->num_wanted;
    int64_t num_stages = m->num_layers * STAGES_OF_A_LAYER + OTHER_STAGES;
    struct run *run = calloc(1, sizeof *run);
    if (!run) return NULL;
    run->stages = aligned_alloc(64, num_stages * sizeof *run->stages);
    struct plan *plan = &run->plan;
    plan->jobs = malloc(2 * (s->tokens + 1) * sizeof *plan->jobs);
    plan->positions = malloc((s->tokens + 1) * sizeof *plan->positions);
    plan->is_wanted = calloc(2 * (s->tokens + 1), 1);
    if (num_bests) plan->bests = aligned_alloc(64, num_bests * sizeof *plan->bests);
    if (!run->stages || !plan->jobs || !plan->positions || !plan->is_wanted ||
        (num_bests && !plan->bests)) {
        free_run(run);
        return NULL;
    }
    memset(run->stages, 0, num_stages * sizeof *run->stages);
    plan->last_jobs = plan->jobs + s->tokens + 1;
    plan->is_alone = plan->is_wanted + s->tokens + 1;
    for (int64_t i = 0; i < num_bests; i++) plan->bests[i] = no_best();
    return run;
}

/* Begins a step. 0, and `*begun` must be ended, before which nothing that is named here may change;
   1 when memory ran out; 2 for a block, a slot, a token id or a wanted token that is not there. */
int cb_begin_decoder(const struct model *m, const struct layer *layers, const struct step *s,
                     struct run **begun) {
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
    int size = omp_get_max_threads();
    struct run *run = new_run(m, s, size);
    if (!run) return 1;
    run->model = m, run->layers = layers, run->step = *s, run->problem = shared;
    make_plan(&shared, s, &run->plan);
    begin_call(&run->call, walk_model, run, size, run->stages);
    *begun = run;
    return 0;
}

/* Works with the others up to the head. */
void cb_help_decoder(struct run *run) { help_call(&run->call); }

/* Works with the others up to the end; `run` is no more. 0; 3 in another process than began it. */
int cb_end_decoder(struct run *run) {
    int status = end_call(&run->call) ? 0 : 3;
    free_run(run);
    return status;
}

