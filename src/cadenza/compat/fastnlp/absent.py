"""What to use instead of the names of fastNLP 1.0 that this adapter does not provide (see `cadenza.compat.absent`)."""

from __future__ import annotations

from collections.abc import Mapping

from cadenza.compat.fastnlp.absent_of_0_5 import ABSENT_OF_0_5, CORE_OF_0_5, METRICS_OF_0_5, UTILS_OF_0_5

ORIGINAL = "fastNLP"
GUIDE = "docs/guides/from-fastnlp.md"

_HERE = "cadenza.compat.fastnlp"
_TORCH = f"Use torch: `{_HERE}.Trainer` trains a `torch.nn.Module`."
_LOADER = f"Use torch: `{_HERE}.TorchDataLoader`, or `{_HERE}.prepare_dataloader`."
_DRIVER = f"Pass `driver='torch'` or a driver of `cadenza.drivers`, such as `cadenza.drivers.DdpDriver`, to `{_HERE}.Trainer`."
_SHARDED = f"Pass `cadenza.drivers.FsdpDriver(shard=...)` as `driver=` to `{_HERE}.Trainer`."
_PADDERS = f"Import padders from `{_HERE}.core.collators`; `{_HERE}.Collator` chooses one itself."
_PADDER = f"Pass `collate_fn=` to `{_HERE}.TorchDataLoader`; `{_HERE}.Collator` pads numbers with `set_pad`."
_SAMPLER = f"Create the sampler again, such as `{_HERE}.RandomSampler`; `load_state_dict` sets its position."
_SHARDS = f"Remove it: `{_HERE}.Evaluator` gives each rank its shard without repetition (`cadenza.loading.Shard`)."
_MIX = "Use `torch.utils.data.ConcatDataset` with a `torch.utils.data.WeightedRandomSampler`."
_ENV = "Read `torch.distributed.get_rank` and `os.environ`, which torchrun sets."
_BACKEND = "Remove it: torch is the only backend, so every metric computes with `torch.Tensor`."
_BAR = f"Pass `progress_bar=` to `{_HERE}.Trainer`, or use `cadenza.callbacks.Limit` and `cadenza.sinks.ProgressBar`."
_PACKAGES = "Use `importlib.util.find_spec`, or `importlib.metadata.version`."
_FILES = f"Read the files with `json.load` or `csv.reader`, and pass the columns to `{_HERE}.DataSet`."
_MODEL = f"Write the model with `torch.nn`; `{_HERE}.models.torch.CNNText` is an example."

ABSENT: Mapping[str, Mapping[str, str]] = {
    "io.loader": {
        "* AGsNewsLoader BQCorpusLoader CLSBaseLoader CMRC2018Loader CNXNLILoader CSVLoader CTBLoader CWSLoader "
        "ChnSentiCorpLoader Conll2003Loader Conll2003NERLoader ConllLoader DBPediaLoader IMDBLoader JsonLoader "
        "LCQMCLoader Loader MNLILoader MRLoader MsraNERLoader NG20Loader OhsumedLoader OntoNotesNERLoader "
        "PeopleDailyNERLoader QNLILoader QuoraLoader R52Loader R8Loader RTELoader SNLILoader SST2Loader SSTLoader "
        "THUCNewsLoader WeiboNERLoader WeiboSenti100kLoader YelpFullLoader YelpPolarityLoader": _FILES
    },
    "io.pipe": {
        "* AGsNewsPipe BQCorpusBertPipe BQCorpusPipe CLSBasePipe CMRC2018BertPipe CNXNLIBertPipe CNXNLIPipe "
        "CWSPipe ChnSentiCorpPipe Conll2003NERPipe Conll2003Pipe DBPediaPipe GranularizePipe IMDBPipe "
        "LCQMCBertPipe LCQMCPipe MNLIBertPipe MNLIPipe MRPipe MRPmiGraphPipe MatchingBertPipe MatchingPipe "
        "MsraNERPipe NG20Pipe NG20PmiGraphPipe OhsumedPipe OhsumedPmiGraphPipe OntoNotesNERPipe PeopleDailyPipe "
        "Pipe QNLIBertPipe QNLIPipe QuoraBertPipe QuoraPipe R52Pipe R52PmiGraphPipe R8Pipe R8PmiGraphPipe "
        "RTEBertPipe RTEPipe RenamePipe SNLIBertPipe SNLIPipe SST2Pipe SSTPipe THUCNewsPipe TruncateBertPipe "
        "WeiboNERPipe WeiboSenti100kPipe YelpFullPipe YelpPolarityPipe iob2 iob2bioes": _FILES
    },
    "io.embed_loader": {"* EmbedLoader": "Read the vectors with `open`, and use `torch.nn.Embedding.from_pretrained`."},
    "io.file_reader": {"*": _FILES},
    "io.file_utils": {"*": "Use `urllib.request.urlretrieve`, or the packages datasets and huggingface_hub."},
    "io.utils": {"*": "Test with `pathlib.Path.exists`."},
    "modules": {"*": "Use `torch.nn`, for example `torch.nn.LSTM`. The package pytorch-crf has a CRF layer."},
    "embeddings": {"*": "Use `torch.nn.Embedding.from_pretrained`, or a model of the package transformers."},
    "transformers": {"*": f"Use the package transformers; its models are `torch.nn.Module`, which `{_HERE}.Trainer` trains."},
    "models.torch": {
        "AdvSeqLabel BiLSTMCRF BiaffineParser LSTMSeq2SeqModel Seq2SeqModel SeqLabeling SequenceGeneratorModel "
        "TransformerSeq2SeqModel": _MODEL
    },
    "models.torch.biaffine_parser": {"* ArcBiaffine GraphParser LabelBilinear": _MODEL},
    "models.torch.seq2seq_generator": {"*": _MODEL},
    "models.torch.seq2seq_model": {"*": _MODEL},
    "models.torch.sequence_labeling": {"*": _MODEL},
    "core": CORE_OF_0_5,
    "core.callbacks.callback_event": {"check_legality": f"Use `{_HERE}.Trainer.on`, which checks the function."},
    "core.callbacks.callback_manager": {"prepare_callbacks": f"Pass `callbacks=` to `{_HERE}.Trainer`, which checks them."},
    "core.callbacks.has_monitor_callback": {"CanItemDataType": "Test with `torch.is_tensor`."},
    "core.callbacks.timer_callback": {"Timers": "Use `time.perf_counter`."},
    "core.callbacks.utils": {"*": f"Derive the callback from `{_HERE}.HasMonitorCallback`."},
    "core.collators.collator": {
        "AUTO_BACKEND_MAPPING SUPPORTED_BACKENDS sequence_idx_str": f"Remove it: `{_HERE}.Collator` returns `torch.Tensor`."
    },
    "core.collators.packer_unpacker": {"*": _PADDER},
    "core.collators.padders": {"PaddleNumberPadder PaddleSequencePadder PaddleTensorPadder": _TORCH},
    "core.collators.padders.jittor_padder": {"*": _TORCH},
    "core.collators.padders.oneflow_padder": {"*": _TORCH},
    "core.collators.padders.paddle_padder": {"*": _TORCH},
    "core.collators.padders.exceptions": {"*": _PADDERS},
    "core.collators.padders.get_padder": {"*": _PADDERS},
    "core.collators.padders.numpy_padder": {"*": _PADDERS},
    "core.collators.padders.padder": {"*": _PADDERS},
    "core.collators.padders.raw_padder": {"*": _PADDERS},
    "core.collators.padders.torch_padder": {"*": _PADDERS},
    "core.collators.padders.torch_utils": {"*": _PADDERS},
    "core.collators.padders.utils": {"*": _PADDERS},
    "core.controllers.utils.utils": {
        "* TrainerEventTrigger check_evaluate_every": f"Use `{_HERE}.Trainer`, which checks and fires."
    },
    "core.dataloaders": {"OverfitDataLoader": f"Pass `overfit_batches=` to `{_HERE}.Trainer`."},
    "core.dataloaders.jittor_dataloader": {"* JittorDataLoader prepare_jittor_dataloader": _LOADER},
    "core.dataloaders.oneflow_dataloader": {"* OneflowDataLoader prepare_oneflow_dataloader": _LOADER},
    "core.dataloaders.paddle_dataloader": {"* PaddleDataLoader prepare_paddle_dataloader": _LOADER},
    "core.dataloaders.torch_dataloader": {"MixDataLoader": _MIX},
    "core.dataloaders.torch_dataloader.mix_dataloader": {"*": _MIX},
    "core.dataloaders.utils": {
        "* HasLenGetitemType indice_collate_wrapper": f"Use `{_HERE}.TorchDataLoader`, which keeps indices."
    },
    "core.dataset.dataset": {"progress_bars": f"Pass `progress_bar=` to `{_HERE}.DataSet.apply_more`."},
    "core.drivers": {"DeepSpeedDriver FairScaleDriver": _SHARDED},
    "core.drivers.jittor_driver": {"* JittorDriver JittorMPIDriver JittorSingleDriver": _TORCH},
    "core.drivers.oneflow_driver": {"* OneflowDDPDriver OneflowDriver OneflowSingleDriver oneflow_seed_everything": _TORCH},
    "core.drivers.paddle_driver": {"* PaddleDriver PaddleFleetDriver PaddleSingleDriver paddle_seed_everything": _TORCH},
    "core.drivers.torch_driver": {"DeepSpeedDriver FairScaleDriver": _SHARDED},
    "core.drivers.torch_driver.ddp": {"find_free_network_port": "Let torchrun find it, or bind a `socket.socket` to port 0."},
    "core.drivers.torch_driver.utils": {
        "DummyGradScaler": "Use `torch.amp.GradScaler` with `enabled=False`.",
        "ForwardState": "Read `torch.nn.Module.training`.",
        "replace_batch_sampler replace_sampler": "Create another `torch.utils.data.DataLoader` with the sampler.",
    },
    "core.drivers.torch_driver.deepspeed": {"*": _SHARDED},
    "core.drivers.torch_driver.dist_utils": {"*": f"Call `{_HERE}.core.drivers.Driver.all_gather`."},
    "core.drivers.torch_driver.fairscale": {"*": _SHARDED},
    "core.drivers.torch_driver.initialize_torch_driver": {"*": _DRIVER},
    "core.drivers.utils": {"* distributed_open_proc": "Start the script with torchrun, or call `torch.multiprocessing.spawn`."},
    "core.log.highlighter": {"* ColorHighlighter": "Use `rich.highlighter.Highlighter` of the package rich."},
    "core.log.logger": {"LoggerSingleton": f"Use `{_HERE}.logger`."},
    "core.metrics": METRICS_OF_0_5,
    "core.metrics.backend": {
        "JittorBackend OneflowBackend PaddleBackend TorchBackend": _BACKEND,
    },
    "core.metrics.backend.auto_backend": {"*": _BACKEND},
    "core.metrics.backend.backend": {"*": _BACKEND},
    "core.metrics.backend.jittor_backend": {"*": _BACKEND},
    "core.metrics.backend.oneflow_backend": {"*": _BACKEND},
    "core.metrics.backend.paddle_backend": {"*": _BACKEND},
    "core.metrics.backend.torch_backend": {"*": _BACKEND},
    "core.metrics.utils": {"* AggregateMethodError": "Catch `ValueError`."},
    "core.samplers.conversion_utils": {"* conversion_between_reproducible_and_unrepeated_sampler": _SHARDS},
    "core.samplers.mix_sampler": {"* DopedSampler InnerSampler MixSampler MixSequentialSampler PollingSampler": _MIX},
    "core.samplers.utils": {"* NumConsumedSamplesArray create_array re_instantiate_sampler": _SAMPLER},
    "core.utils": UTILS_OF_0_5,
    "core.utils.cache_results": {
        "FuncCallVisitor Hasher get_func_calls truncate_start_blanks": f"Use `{_HERE}.cache_results`, which keeps the hash."
    },
    "core.utils.dummy_class": {"* DummyClass": "Use `types.SimpleNamespace`."},
    "core.utils.jittor_utils": {"* is_jittor_dataset is_jittor_module jittor_collate_wraps": _TORCH},
    "core.utils.oneflow_utils": {
        "* get_oneflow_device is_in_oneflow_dist is_oneflow_module oneflow_move_data_to_device": _TORCH,
    },
    "core.utils.paddle_utils": {
        "* get_paddle_device_id get_paddle_gpu_str is_in_fnlp_paddle_dist is_in_paddle_dist is_in_paddle_launch_dist "
        "is_paddle_module paddle_move_data_to_device paddle_to": _TORCH
    },
    "core.utils.rich_progress": {"DummyFRichProgress Singleton SpeedColumn": _BAR},
    "core.utils.tqdm_progress": {"DummyFTqdmProgress Singleton": _BAR},
    "core.utils.torch_utils": {"DEFAULT_TORCH_GROUP": "Pass no group, or `torch.distributed.group`."},
    "core.utils.utils": {
        "deprecated": "Use `warnings.warn`.",
        "get_class_that_defined_method": "Read `__qualname__`, or use `inspect.getmro`.",
        "is_notebook": "Test whether `sys.modules` has 'IPython'.",
        "pretty_table_printer sub_column": f"Call `print` on the `{_HERE}.DataSet`.",
        "wait_filepath": "Use `pathlib.Path.exists` in a loop, or `torch.distributed.barrier`.",
    },
    "core.vocabulary": {"VocabularyOption": f"Pass the arguments to `{_HERE}.Vocabulary`."},
    "envs": {
        "backend need_import dump_fastnlp_backend": _TORCH,
    },
    "envs.imports": {"backend need_import": _TORCH, "_module_available _compare_version": _PACKAGES},
    "envs.set_backend": {"*": _TORCH},
    "envs.set_env_on_import": {"*": _ENV},
    **ABSENT_OF_0_5,
}
