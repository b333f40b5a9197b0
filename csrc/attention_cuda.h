/* Spherical attention on CUDA devices: the plain C interface. The operation, its tensors and its tables are those of
 * attention.h, every pointer on the device; work is queued on a stream and nothing waits for it.
 *
 * A schedule cuts each side into tiles of 64 centres: queries, and keys for dk and dv. The first `splits` tiles of
 * a side are parts of tiles with many neighbours, one after another; their partial results meet in the workspace.
 */
#ifndef SFNO_DIST_ATTENTION_CUDA_H
#define SFNO_DIST_ATTENTION_CUDA_H

#include "attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `shape_rows` (1, 2 or 4) x 64 / shape_rows points from (first_row, global column first_column) eastward, of which
 * `rows` x `columns` are there, and their neighbours in rows first_neighbour..end_neighbour - 1. */
typedef struct {
    int32_t first_row, shape_rows, rows, first_column, columns;
    int32_t first_neighbour, end_neighbour;
    int32_t part, parts; /* of the same centres */
} sfno_dist_tile;

typedef struct {
    void *stream;
    int32_t device;     /* that the stream and all pointers belong to */
    int32_t allow_tf32; /* float32 inputs on tensor cores, their products rounded to 10 bits */
    int32_t query_splits, key_splits;
    int64_t query_tiles, key_tiles;
    const sfno_dist_tile *query_schedule, *key_schedule; /* on the device */
    float *workspace;                                    /* on the device; call->delta is not used */
} sfno_dist_schedule;

/* Both return 0, or a nonzero code that sfno_dist_cuda_message explains. float64 is refused. */
SFNO_DIST_API int sfno_dist_cuda_forward(const sfno_dist_attention *call, const sfno_dist_schedule *schedule);
SFNO_DIST_API int sfno_dist_cuda_backward(const sfno_dist_attention *call, const sfno_dist_schedule *schedule);

/* Bytes of workspace that these calls need. */
SFNO_DIST_API int64_t sfno_dist_cuda_workspace(const sfno_dist_attention *call, const sfno_dist_schedule *schedule);

SFNO_DIST_API const char *sfno_dist_cuda_message(void); /* about the last failure of this thread */
SFNO_DIST_API const char *sfno_dist_cuda_memory(void);  /* where tensors must lie: "cuda", or "cpu" in the tests */
SFNO_DIST_API int64_t sfno_dist_schedule_size(void);

#ifdef __cplusplus
}
#endif
#endif
