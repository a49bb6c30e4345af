{{- define "kvferry.image" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}

{{/* Everything is named after the release; daemons after their pods. */}}
{{- define "kvferry.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "kvferry.labels" -}}
app.kubernetes.io/name: kvferry
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvferry.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvferry.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "kvferry.preStop" -}}
preStop: # who calls it hears that the pod ends before it refuses
  sleep:
    seconds: 5
{{- end }}

{{/* Ports of a role: its session, its metrics. */}}
{{- define "kvferry.sessionPort" -}}{{ eq . "prefill" | ternary 7071 7070 }}{{- end }}
{{- define "kvferry.metricsPort" -}}{{ eq . "prefill" | ternary 9471 9470 }}{{- end }}
{{- define "kvferry.enginePort" -}}{{ eq .Values.engine.kind "vllm" | ternary 8000 8101 }}{{- end }}

{{/* (root, role) -> MiB of memory-backed /dev/shm, of the daemon's limit. */}}
{{- define "kvferry.shmMiB" -}}
{{- $values := index .root.Values .role -}}
{{- if eq .root.Values.engine.kind "vllm" -}}2112{{- else if gt (int .root.Values.gpu.count) 0 -}}64{{- else -}}{{ add $values.poolMiB 64 }}{{- end -}}
{{- end }}
{{- define "kvferry.limitMiB" -}}
{{- $values := index .root.Values .role -}}
{{- $peers := int (index .root.Values (eq .role "prefill" | ternary "decode" "prefill")).replicas -}}
{{- $slots := gt (int .root.Values.gpu.count) 0 | ternary 0 128 -}}
{{/* /dev/shm, host tier with the sixteenth that is to stay free beside it, and for each session its slots and its courier (60 MiB); the daemon itself */}}
{{- add (include "kvferry.shmMiB" .) $values.hostMiB (div $values.hostMiB 16) (mul $peers (add $slots 60)) 768 -}}
{{- end }}

{{- define "kvferry.devices" -}}
{{- range $i := until (int .Values.gpu.count) }}{{ if $i }},{{ end }}cuda:{{ $i }}{{ end -}}
{{- end }}
