/* Spherical attention on the CPU: the plain C interface of the compiled kernels.
 *
 * A query attends to the arcs of key columns within its geodesic cutoff. With ticks = lcm(query_nlon, key_nlon)
 * around the circle, key (h, j) is a neighbour of query (r, o) when
 *     circular_distance(j * ticks / key_nlon, o * ticks / query_nlon) <= half_widths[r, h].
 *
 *     s = q . k     lse = log sum w exp(s)     y = sum w exp(s - lse) v
 *     p = w exp(s - lse)     ds = p (dy . v - delta)     delta = dy . y - dlse
 *     dq = sum ds k     dk = sum ds q     dv = sum p dy
 *
 * Results are the same bits for every number of threads. A query without keys gets y = 0 and lse = -inf.
 */
#ifndef SFNO_DIST_ATTENTION_H
#define SFNO_DIST_ATTENTION_H

#include <stdint.h>

#if defined(__GNUC__)
#define SFNO_DIST_API __attribute__((visibility("default")))
#else
#define SFNO_DIST_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum sfno_dist_dtype { SFNO_DIST_FLOAT32 = 0, SFNO_DIST_FLOAT64 = 1, SFNO_DIST_BFLOAT16 = 2, SFNO_DIST_FLOAT16 = 3 };

/* Values at points: element (batch, head, point, channel); channels are contiguous, strides count elements.
 * A query point is (row, column); a key point is one position, so that row == column there. */
typedef struct {
    void *data; /* NULL: absent */
    int64_t batch_stride, head_stride, row_stride, column_stride;
} sfno_dist_tensor;

typedef struct {
    int32_t dtype; /* of every tensor; lse, dlse and delta are float64 for float64 and float32 otherwise */
    int32_t threads;
    int64_t batches, heads, depth, value_depth;
    int64_t query_rows, query_columns, key_rows, key_points;
    int64_t query_nlon, key_nlon;   /* columns around the whole circle */
    int64_t first_column;           /* global column of query column 0 */
    const int32_t *half_widths;     /* [query_rows, key_rows] in ticks, -1 for none */
    const double *key_weights;      /* [key_rows] */
    const int64_t *key_windows;     /* [key_rows, 3]: first global column, count, position of the first */
    sfno_dist_tensor q, k, v, y;
    void *lse;                      /* [batches, heads, query_rows, query_columns] */
    /* backward only */
    sfno_dist_tensor dy, dq, dk, dv; /* dq NULL, or dk and dv both NULL: not computed */
    const void *dlse;               /* like lse, or NULL */
    void *delta;                    /* like lse: workspace */
} sfno_dist_attention;

/* Both return 0, or a nonzero code that sfno_dist_message explains. */
SFNO_DIST_API int sfno_dist_attention_forward(const sfno_dist_attention *call);
SFNO_DIST_API int sfno_dist_attention_backward(const sfno_dist_attention *call);

/* One line about the last failure of this thread. */
SFNO_DIST_API const char *sfno_dist_message(void);

/* Instruction sets in this binary, space separated, and the one in use; NULL (with a message) when the
 * environment variable SFNO_DIST_ISA names one that is not built or that this machine lacks. */
SFNO_DIST_API const char *sfno_dist_instruction_sets(void);
SFNO_DIST_API const char *sfno_dist_instruction_set(void);

/* Size of sfno_dist_attention, so that a caller with another layout is noticed. */
SFNO_DIST_API int64_t sfno_dist_attention_size(void);

#ifdef __cplusplus
}
#endif
#endif
