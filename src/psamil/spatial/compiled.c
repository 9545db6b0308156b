/* Posterior attention of one head over one bag, for any positions: what compiled.py builds, loads and calls.

   Sixteen query tiles close together make a block, the lanes of PARTS registers. Their keys, the tiles within the radius of
   the block's bounding box, are found by binary search in rows of sorted tiles and taken in rounds of KEYS that stay in
   the first-level cache. Scores are laid out (key, query), in base 2, and differ from the definition by terms that
   cancel in the softmax:

       S_ji = log2(e) ((q_i - m) . (k_j - m) / sqrt d - ||k_j - m||^2 / (2 sqrt d) + log f(d_ij | theta)),

   m the mean of the keys. The forward pass keeps a running maximum; the backward pass computes scores again. Products
   are written for registers: GROUP x PARTS accumulators.

   Set by the compiler's command line: D, the width of a head rounded up to whole vectors, LOG_PRIOR(d2, theta) and
   SLOPE(d2, theta). */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define QUERIES 16
#define KEYS 64
#define WIDE_STEPS 64  /* extent of a block beyond which distances are computed in double precision */
#define FAR_D2 1e18f   /* squared distance of padding: beyond any radius */
#define LOG2_E 1.4426950408889634f
#if defined(__AVX512F__)
#define LANES 16 /* of a register */
#define GROUP 16
#elif defined(__AVX__)
#define LANES 8
#define GROUP 4
#else
#define LANES 4
#define GROUP 2
#endif
#define PARTS (QUERIES / LANES)
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES), may_alias)); /* a register: compilers keep wider ones in memory */
typedef float loose __attribute__((vector_size(4 * LANES), may_alias, aligned(4))); /* in memory, anywhere */
typedef int32_t ivec __attribute__((vector_size(4 * LANES), may_alias));
typedef union {
    vec part[PARTS];
    float lane[QUERIES];
} wide; /* a number for each query of a block */

typedef struct {
    int64_t n, rows;
    const int64_t *order;              /* (n) sorted tile -> tile */
    const double *x, *y;               /* (n) of the sorted tiles: by row, then by x */
    const int64_t *row_start;          /* (rows + 1) */
    const double *row_low, *row_high;  /* (rows) smallest and largest y */
    const int64_t *packed;             /* (n) sorted tiles in the order of queries: 16 in a row are close together */
} Bag;

typedef struct {
    int64_t d;               /* width of a head */
    int64_t tile, key_tile;  /* strides, in numbers: of q, k, v; the same for out, grad and gradients: out_tile */
    int64_t value_tile, out_tile, lse_tile;
    const float *q, *k, *v;  /* first tile of the bag, this head */
    float *out, *lse;
    const float *grad;
    float *dq, *dk, *dv;
    double *dtheta;
    float theta;
    double keep_d2;
} Head;

/* ---- elementary functions ---------------------------------------------------------------------------------- */

static inline vec all(float value) { return value - (vec){0}; }
static inline vec as_vec(ivec bits) { return (vec)bits; }
static inline vec where(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

static inline vec root(vec x) {
    UNROLL for (int i = 0; i < LANES; i++) x[i] = sqrtf(x[i]);
    return x;
}

/* 2^x, relative error below 2e-7; 1e-38 below its range */
static inline vec power_of_2(vec x) {
    const vec to_integer = all(12582912.0f); /* 1.5 * 2^23 */
    x = where(x < -126.0f, all(-126.0f), x);
    const vec rounded = x + to_integer;
    const vec f = x - (rounded - to_integer); /* in [-1/2, 1/2] */
    vec y = all(0.00015353359f); /* least largest relative error */
    y = y * f + 0.00133988739f;
    y = y * f + 0.00961843692f;
    y = y * f + 0.0555033237f;
    y = y * f + 0.240226477f;
    y = y * f + 0.693147182f;
    y = y * f + 1.0f;
    return y * as_vec((((ivec)rounded - (ivec)to_integer) + 127) << 23); /* a product, so that NaN stays NaN */
}

/* log(1 + x) for x >= 0 */
static inline vec log_1_plus(vec x) {
    const vec u = 1.0f + x;
    const ivec bits = (ivec)u - 0x3f3504f3; /* mantissa from sqrt(1/2) to sqrt(2) */
    const ivec exponent = bits >> 23;
    const vec m = as_vec((bits & 0x007fffff) + 0x3f3504f3);
    const vec s = (m - 1.0f) / (m + 1.0f), s2 = s * s;
    vec y = all(1.0f / 9);
    y = y * s2 + 1.0f / 7;
    y = y * s2 + 1.0f / 5;
    y = y * s2 + 1.0f / 3;
    y = y * s2 + 1.0f;
    return __builtin_convertvector(exponent, vec) * 0.69314718f + 2.0f * s * y + (x - (u - 1.0f)) / u;
}

/* ---- products ---------------------------------------------------------------------------------------------- */

/* s[j] += sum_c rows[j][c] columns[c], for j < count, a multiple of GROUP */
static inline void rows_times(const float *restrict rows, const wide *restrict columns, wide *restrict s, int count) {
    for (int j = 0; j < count; j += GROUP) {
        const float *r = rows + j * D;
        vec a[GROUP][PARTS];
        UNROLL for (int i = 0; i < GROUP; i++)
            UNROLL for (int p = 0; p < PARTS; p++) a[i][p] = s[j + i].part[p];
        for (int c = 0; c < D; c++) {
            vec column[PARTS];
            UNROLL for (int p = 0; p < PARTS; p++) column[p] = columns[c].part[p];
            UNROLL for (int i = 0; i < GROUP; i++)
                UNROLL for (int p = 0; p < PARTS; p++) a[i][p] += r[i * D + c] * column[p];
        }
        UNROLL for (int i = 0; i < GROUP; i++)
            UNROLL for (int p = 0; p < PARTS; p++) s[j + i].part[p] = a[i][p];
    }
}

/* columns[c] += sum_j rows[j][c] weights[j] */
static inline void transposed_times(const float *restrict rows, const wide *restrict weights, wide *restrict columns,
                                    int count) {
    for (int c = 0; c < D; c += GROUP) {
        vec a[GROUP][PARTS];
        UNROLL for (int i = 0; i < GROUP; i++)
            UNROLL for (int p = 0; p < PARTS; p++) a[i][p] = columns[c + i].part[p];
        for (int j = 0; j < count; j++) {
            vec weight[PARTS];
            UNROLL for (int p = 0; p < PARTS; p++) weight[p] = weights[j].part[p];
            UNROLL for (int i = 0; i < GROUP; i++)
                UNROLL for (int p = 0; p < PARTS; p++) a[i][p] += rows[j * D + c + i] * weight[p];
        }
        UNROLL for (int i = 0; i < GROUP; i++)
            UNROLL for (int p = 0; p < PARTS; p++) columns[c + i].part[p] = a[i][p];
    }
}

/* to[at[j]] += sum_i weights[j][i] queries[i], rows of D; queries aligned */
static inline void add_products(const wide *restrict weights, const float *restrict queries, float *restrict to,
                                const int64_t *restrict at, int count) {
    for (int j = 0; j < count; j += GROUP) {
        for (int c = 0; c < D; c += QUERIES) {
            vec a[GROUP][PARTS];
            UNROLL for (int g = 0; g < GROUP; g++)
                UNROLL for (int p = 0; p < PARTS; p++) a[g][p] = all(0);
            UNROLL for (int i = 0; i < QUERIES; i++) {
                vec row[PARTS];
                UNROLL for (int p = 0; p < PARTS; p++) row[p] = ((const vec *)(queries + i * D + c))[p];
                UNROLL for (int g = 0; g < GROUP; g++)
                    UNROLL for (int p = 0; p < PARTS; p++) a[g][p] += weights[j + g].lane[i] * row[p];
            }
            UNROLL for (int g = 0; g < GROUP; g++) {
                if (j + g >= count) continue;
                UNROLL for (int p = 0; p < PARTS; p++) ((loose *)(to + at[j + g] * D + c))[p] += a[g][p];
            }
        }
    }
}

/* ---- blocks and their keys --------------------------------------------------------------------------------- */

typedef struct {
    int count;                /* tiles of the block */
    int64_t tile[QUERIES];    /* tile of each lane; lanes beyond count repeat the last */
    double qx[QUERIES], qy[QUERIES];
    double x0, y0, x1, y1;    /* box */
    wide dx, dy;              /* positions relative to the box's corner */
    int wide;
    /* state of the search */
    double reach;
    int64_t row, next, stop;
    double left, right;
} Block;

static int64_t first_not_below(const double *values, int64_t low, int64_t high, double bound) {
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (values[middle] < bound) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void open_block(Block *b, const Bag *bag, int64_t first, double keep_d2) {
    b->count = (int)(bag->n - first < QUERIES ? bag->n - first : QUERIES);
    b->x0 = b->y0 = INFINITY;
    b->x1 = b->y1 = -INFINITY;
    for (int i = 0; i < QUERIES; i++) {
        const int64_t sorted = bag->packed[first + (i < b->count ? i : b->count - 1)];
        b->tile[i] = bag->order[sorted];
        const double x = b->qx[i] = bag->x[sorted], y = b->qy[i] = bag->y[sorted];
        b->x0 = x < b->x0 ? x : b->x0;
        b->x1 = x > b->x1 ? x : b->x1;
        b->y0 = y < b->y0 ? y : b->y0;
        b->y1 = y > b->y1 ? y : b->y1;
    }
    for (int i = 0; i < QUERIES; i++) {
        b->dx.lane[i] = (float)(b->qx[i] - b->x0);
        b->dy.lane[i] = (float)(b->qy[i] - b->y0);
    }
    b->wide = b->x1 - b->x0 > WIDE_STEPS || b->y1 - b->y0 > WIDE_STEPS;
    b->reach = sqrt(keep_d2) * (1 + 1e-9);
    b->row = first_not_below(bag->row_high, 0, bag->rows, b->y0 - b->reach) - 1;
    b->next = b->stop = 0;
}

/* The next sorted tiles that may be within reach of the block: [*start, *start + result), at most room; 0 at the end */
static int64_t next_run(Block *b, const Bag *bag, int64_t room, int64_t *start) {
    while (b->next == b->stop) {
        if (++b->row >= bag->rows || bag->row_low[b->row] > b->y1 + b->reach) return 0;
        const double below = b->y0 - bag->row_high[b->row], above = bag->row_low[b->row] - b->y1;
        const double dy = below > 0 ? below : above > 0 ? above : 0;
        const double rest = b->reach * b->reach - dy * dy;
        const double half = rest > 0 ? sqrt(rest) : 0;
        const int64_t end = bag->row_start[b->row + 1];
        b->next = first_not_below(bag->x, bag->row_start[b->row], end, b->x0 - half);
        b->stop = first_not_below(bag->x, b->next, end, nextafter(b->x1 + half, INFINITY));
    }
    const int64_t size = b->stop - b->next < room ? b->stop - b->next : room;
    *start = b->next;
    b->next += size;
    return size;
}

typedef struct {
    int count, padded;
    int64_t at[KEYS]; /* sorted tile */
    float key[KEYS * D] __attribute__((aligned(64))), value[KEYS * D] __attribute__((aligned(64)));
    wide d2[KEYS], s[KEYS];
} Round;

static inline void squared_distances(const Block *b, double x, double y, wide *d2) {
    if (b->wide) {
        for (int i = 0; i < QUERIES; i++) {
            const double dx = x - b->qx[i], dy = y - b->qy[i];
            d2->lane[i] = (float)(dx * dx + dy * dy);
        }
        return;
    }
    UNROLL for (int p = 0; p < PARTS; p++) {
        const vec dx = (float)(x - b->x0) - b->dx.part[p], dy = (float)(y - b->y0) - b->dy.part[p];
        d2->part[p] = dx * dx + dy * dy;
    }
}

static inline void copy_row(float *restrict to, const float *restrict from) {
    memcpy(to, from, D * sizeof(float));
}

/* Fills a round with keys, values, squared distances, and scores as far as they do not depend on the query's features */
static void fill(Round *r, Block *b, const Bag *bag, const float *keys, const float *values, const float *bias,
                 const Head *h) {
    int64_t start, size;
    r->count = 0;
    while (r->count < KEYS && (size = next_run(b, bag, KEYS - r->count, &start))) {
        for (int64_t j = start; j < start + size; j++, r->count++) {
            copy_row(r->key + r->count * D, keys + j * D);
            copy_row(r->value + r->count * D, values + j * D);
            r->at[r->count] = j;
            squared_distances(b, bag->x[j], bag->y[j], &r->d2[r->count]);
            UNROLL for (int p = 0; p < PARTS; p++)
                r->s[r->count].part[p] = bias[j] + LOG2_E * (LOG_PRIOR(r->d2[r->count].part[p], h->theta));
        }
    }
    r->padded = (r->count + GROUP - 1) / GROUP * GROUP;
    memset(r->key + r->count * D, 0, (r->padded - r->count) * D * sizeof(float));
    memset(r->value + r->count * D, 0, (r->padded - r->count) * D * sizeof(float));
    for (int j = r->count; j < r->padded; j++) {
        UNROLL for (int p = 0; p < PARTS; p++) {
            r->d2[j].part[p] = all(FAR_D2);
            r->s[j].part[p] = all(0);
        }
    }
}

/* ---- the two passes ---------------------------------------------------------------------------------------- */

typedef struct {
    float *memory, *keys, *values, *bias; /* sorted, keys centred, rows of D */
    float mean[D];
} Tables;

static int open_tables(Tables *t, const Bag *bag, const Head *h) {
    const int64_t n = bag->n;
    t->memory = aligned_alloc(64, ((2 * n * D + n) * sizeof(float) + 63) / 64 * 64);
    if (!t->memory) return 0;
    t->keys = t->memory;
    t->values = t->keys + n * D;
    t->bias = t->values + n * D;
    double sum[D] = {0};
    for (int64_t j = 0; j < n; j++)
        for (int64_t c = 0; c < h->d; c++) sum[c] += h->k[j * h->key_tile + c];
    for (int c = 0; c < D; c++) t->mean[c] = (float)(sum[c] / (double)n);
    for (int64_t j = 0; j < n; j++) {
        const float *k = h->k + bag->order[j] * h->key_tile, *v = h->v + bag->order[j] * h->value_tile;
        float *key = t->keys + j * D, *value = t->values + j * D, norm = 0;
        for (int64_t c = 0; c < h->d; c++) {
            key[c] = k[c] - t->mean[c];
            value[c] = v[c];
            norm += key[c] * key[c];
        }
        for (int64_t c = h->d; c < D; c++) key[c] = value[c] = 0;
        t->bias[j] = norm * (-0.5f * LOG2_E / sqrtf((float)h->d));
    }
    return 1;
}

/* (rows of the block's tiles - mean) * scale, as rows [QUERIES][D] and as columns [D] of lanes */
static void load(const float *from, int64_t stride, const float *mean, float scale, const Block *b, int64_t d,
                 float *rows, wide *columns) {
    for (int i = 0; i < QUERIES; i++) {
        const float *row = from + b->tile[i] * stride;
        for (int64_t c = 0; c < D; c++) {
            const float x = c < d ? (row[c] - (mean ? mean[c] : 0)) * scale : 0;
            rows[i * D + c] = x;
            columns[c].lane[i] = x;
        }
    }
}

static void store(const wide *columns, wide scale, float *to, int64_t stride, const Block *b, int64_t d) {
    wide scaled[D];
    for (int c = 0; c < D; c++)
        UNROLL for (int p = 0; p < PARTS; p++) scaled[c].part[p] = columns[c].part[p] * scale.part[p];
    for (int i = 0; i < b->count; i++)
        for (int64_t c = 0; c < d; c++) to[b->tile[i] * stride + c] = scaled[c].lane[i];
}

int forward(const Bag *bag, const Head *h) {
    Tables t;
    if (!open_tables(&t, bag, h)) return 1;
    const float scale = 1 / sqrtf((float)h->d), keep_d2 = (float)fmin(h->keep_d2, 0.5 * FAR_D2);
    float rows[QUERIES * D];
    wide query[D], out[D];
    Round r;
    for (int64_t first = 0; first < bag->n; first += QUERIES) {
        Block b;
        open_block(&b, bag, first, h->keep_d2);
        load(h->q, h->tile, t.mean, LOG2_E * scale, &b, h->d, rows, query);
        memset(out, 0, sizeof out);
        wide top, total;
        UNROLL for (int p = 0; p < PARTS; p++) {
            top.part[p] = all(-1e30f);
            total.part[p] = all(0);
        }
        for (fill(&r, &b, bag, t.keys, t.values, t.bias, h); r.count; fill(&r, &b, bag, t.keys, t.values, t.bias, h)) {
            rows_times(r.key, query, r.s, r.padded);
            UNROLL for (int p = 0; p < PARTS; p++) {
                const vec before = top.part[p];
                vec highest = before, sum = all(0);
                for (int j = 0; j < r.count; j++) {
                    const vec s = where(r.d2[j].part[p] <= keep_d2, r.s[j].part[p], before);
                    highest = where(s > highest, s, highest);
                }
                for (int j = 0; j < r.padded; j++) {
                    const vec weight = power_of_2(r.s[j].part[p] - highest);
                    r.s[j].part[p] = (vec)((ivec)weight & (r.d2[j].part[p] <= keep_d2));
                    sum += r.s[j].part[p];
                }
                const vec shrink = power_of_2(before - highest);
                for (int c = 0; c < D; c++) out[c].part[p] *= shrink;
                total.part[p] = total.part[p] * shrink + sum;
                top.part[p] = highest;
            }
            transposed_times(r.value, r.s, out, r.padded);
        }
        wide inverse;
        UNROLL for (int p = 0; p < PARTS; p++) inverse.part[p] = 1.0f / total.part[p];
        store(out, inverse, h->out, h->out_tile, &b, h->d);
        for (int i = 0; i < b.count; i++) h->lse[b.tile[i] * h->lse_tile] = top.lane[i] + log2f(total.lane[i]);
    }
    free(t.memory);
    return 0;
}

/* P = exp2(S - lse) computed again; dS_ji = P_ji (v_j . dO_i - O_i . dO_i) */
int backward(const Bag *bag, const Head *h) {
    Tables t;
    const int64_t n = bag->n;
    float *sums = calloc(2 * n * D + n, sizeof(float));
    if (!sums || !open_tables(&t, bag, h)) {
        free(sums);
        return 1;
    }
    float *dk = sums, *dv = dk + n * D, *ds_sum = dv + n * D;
    const float scale = 1 / sqrtf((float)h->d), keep_d2 = (float)fmin(h->keep_d2, 0.5 * FAR_D2);
    float query_rows[QUERIES * D] __attribute__((aligned(64))), grad_rows[QUERIES * D] __attribute__((aligned(64)));
    float out_rows[QUERIES * D] __attribute__((aligned(64)));
    wide query[D], grad[D], out[D], dq[D], dp[KEYS], scales;
    UNROLL for (int p = 0; p < PARTS; p++) scales.part[p] = all(scale);
    double dtheta = 0;
    Round r;
    for (int64_t first = 0; first < n; first += QUERIES) {
        Block b;
        open_block(&b, bag, first, h->keep_d2);
        load(h->q, h->tile, t.mean, LOG2_E * scale, &b, h->d, query_rows, query);
        load(h->grad, h->out_tile, NULL, 1, &b, h->d, grad_rows, grad);
        load(h->out, h->out_tile, NULL, 1, &b, h->d, out_rows, out);
        wide delta, lse;
        UNROLL for (int p = 0; p < PARTS; p++) {
            delta.part[p] = all(0);
            for (int c = 0; c < D; c++) delta.part[p] += out[c].part[p] * grad[c].part[p];
        }
        for (int i = 0; i < QUERIES; i++) /* a lane that repeats another: no weight */
            lse.lane[i] = i < b.count ? h->lse[b.tile[i] * h->lse_tile] : 1e30f;
        vec slopes = all(0);
        memset(dq, 0, sizeof dq);
        for (fill(&r, &b, bag, t.keys, t.values, t.bias, h); r.count; fill(&r, &b, bag, t.keys, t.values, t.bias, h)) {
            rows_times(r.key, query, r.s, r.padded);
            for (int j = 0; j < r.padded; j++)
                UNROLL for (int p = 0; p < PARTS; p++) dp[j].part[p] = -delta.part[p];
            rows_times(r.value, grad, dp, r.padded);
            for (int j = 0; j < r.padded; j++) {
                vec sum = all(0);
                UNROLL for (int p = 0; p < PARTS; p++) {
                    const vec d2 = r.d2[j].part[p], weight = power_of_2(r.s[j].part[p] - lse.part[p]);
                    const vec kept = (vec)((ivec)weight & (d2 <= keep_d2)), ds = dp[j].part[p] * kept;
                    r.s[j].part[p] = kept;
                    dp[j].part[p] = ds;
                    slopes += ds * (SLOPE(d2, h->theta));
                    sum += ds;
                }
                if (j < r.count) {
                    float of_key = 0;
                    UNROLL for (int i = 0; i < LANES; i++) of_key += sum[i];
                    ds_sum[r.at[j]] += of_key;
                }
            }
            transposed_times(r.key, dp, dq, r.padded);
            add_products(dp, query_rows, dk, r.at, r.count);
            add_products(r.s, grad_rows, dv, r.at, r.count);
        }
        store(dq, scales, h->dq, h->out_tile, &b, h->d);
        for (int i = 0; i < LANES; i++) dtheta += slopes[i];
    }
    for (int64_t j = 0; j < n; j++) {
        const int64_t to = bag->order[j] * h->out_tile;
        for (int64_t c = 0; c < h->d; c++) {
            h->dk[to + c] = dk[j * D + c] / LOG2_E - ds_sum[j] * t.keys[j * D + c] * scale;
            h->dv[to + c] = dv[j * D + c];
        }
    }
    *h->dtheta = dtheta;
    free(t.memory);
    free(sums);
    return 0;
}
