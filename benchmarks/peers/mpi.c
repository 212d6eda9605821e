/* MPI collectives on float vectors that are written before each call and read after it, as
   `weft-bench-fabric filled` runs Weft's. Usage: mpi SECONDS CALLS COLLECTIVES SIZES, lists with commas.
   Rank 0 prints a JSON line for each case: the slowest rank's microseconds for each call. */

#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WARM_UP 3
#define LEAST_CALLS 5

static int rank, ranks;

struct vectors {
    float *input, *output;
    /* Elements in both; a share is an equal part for each rank. */
    int inputs, outputs, share;
};

static void call(const char *collective, struct vectors *v)
{
    if (!strcmp(collective, "all-reduce"))
        MPI_Allreduce(MPI_IN_PLACE, v->output, v->outputs, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (!strcmp(collective, "reduce-scatter"))
        MPI_Reduce_scatter_block(v->input, v->output, v->share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (!strcmp(collective, "all-gather"))
        MPI_Allgather(v->input, v->share, MPI_FLOAT, v->output, v->share, MPI_FLOAT, MPI_COMM_WORLD);
    else if (!strcmp(collective, "broadcast"))
        MPI_Bcast(v->output, v->outputs, MPI_FLOAT, 0, MPI_COMM_WORLD);
    else
        MPI_Alltoall(v->input, v->share, MPI_FLOAT, v->output, v->share, MPI_FLOAT, MPI_COMM_WORLD);
}

/* In-place collectives have their input in the output. */
static void fill(struct vectors *v, int number)
{
    for (int at = 0; at < v->outputs; at++)
        v->output[at] = v->input ? -1 : rank + number % 1000;
    for (int at = 0; v->input && at < v->inputs; at++)
        v->input[at] = rank + number % 1000;
}

static int is_wrong(const char *collective, const struct vectors *v, int number)
{
    int base = number % 1000, sum = ranks * (ranks - 1) / 2 + ranks * base;
    for (int at = 0; at < v->outputs; at++) {
        float expected = strstr(collective, "reduce") ? sum : base;
        if (!strcmp(collective, "all-gather") || !strcmp(collective, "all-to-all"))
            expected += at / v->share;
        if (v->output[at] != expected)
            return 1;
    }
    return 0;
}

static double timed(const char *collective, struct vectors *v, int number)
{
    fill(v, number);
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    call(collective, v);
    return (MPI_Wtime() - start) * 1e6;
}

static void measure(const char *collective, size_t bytes, double seconds, int most)
{
    int in_place = !strcmp(collective, "all-reduce") || !strcmp(collective, "broadcast");
    int share = bytes / 4 / ranks > 0 ? bytes / 4 / ranks : 1;
    int whole = in_place ? (bytes / 4 > 0 ? (int)(bytes / 4) : 1) : share * ranks;
    struct vectors v = { NULL, NULL, whole, whole, share };
    if (!strcmp(collective, "all-gather"))
        v.inputs = share;
    if (!strcmp(collective, "reduce-scatter"))
        v.outputs = share;
    if (!in_place)
        v.input = malloc(v.inputs * sizeof(float));
    v.output = malloc(v.outputs * sizeof(float));
    double longest = 0;
    for (int number = 0; number < WARM_UP; number++)
        longest = fmax(longest, timed(collective, &v, number));
    MPI_Allreduce(MPI_IN_PLACE, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    int calls = (int)fmin(most, fmax(LEAST_CALLS, seconds * 1e6 / longest)), wrong = 0;
    double *times = malloc(calls * sizeof(double));
    for (int number = 0; number < calls; number++) {
        times[number] = timed(collective, &v, number);
        wrong += is_wrong(collective, &v, number);
    }
    MPI_Reduce(rank ? times : MPI_IN_PLACE, times, calls, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(rank ? &wrong : MPI_IN_PLACE, &wrong, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
    if (!rank) {
        printf("{\"collective\": \"%s\", \"bytes\": %zu, \"wrong\": %d, \"us\": [", collective, bytes, wrong);
        for (int number = 0; number < calls; number++)
            printf("%s%.3f", number ? ", " : "", times[number]);
        printf("]}\n");
        fflush(stdout);
    }
    free(times);
    free(v.input);
    free(v.output);
}

int main(int count, char **arguments)
{
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (count != 5) {
        fprintf(stderr, "usage: mpi SECONDS CALLS COLLECTIVES SIZES\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    char *collectives = arguments[3], *next;
    for (char *one = strtok_r(collectives, ",", &next); one; one = strtok_r(NULL, ",", &next)) {
        char *sizes = strdup(arguments[4]), *rest;
        for (char *size = strtok_r(sizes, ",", &rest); size; size = strtok_r(NULL, ",", &rest))
            measure(one, strtoul(size, NULL, 10), atof(arguments[1]), atoi(arguments[2]));
        free(sizes);
    }
    MPI_Finalize();
    return 0;
}
